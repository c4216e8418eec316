"""Owns how each fused kernel is cut into blocks: a table for the shapes that were timed, and a rule for every other shape.

Does not own the kernels. Times behind the table are of whole decode steps, never of a kernel alone.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

Kernel = Literal["norm_linear", "proj_residual", "norm_gate_up"]


@dataclass(frozen=True)
class Tile:
    """A block takes `rows` out features and walks the in features in slices of `k_slice`.

    Attributes:
        rows: power of two, at most the weight's rows (of gate alone for norm_gate_up); 16 and up for batches.
        k_slice: power of two, at most the in features; 16 and up for batches, 32 and up with FP8 weights, 512 at most: within
            a slice the tensor cores keep 14 bits of a sum.
        warps, stages: Triton's; batches keep one slice less than stages on their way and ask for those before the wait.
        splits: blocks that share a row's in features; a batch's proj_residual, and its q, k and v.
        ahead: slices that a thread keeps on their way and asks for before the wait; one row only.
        registers: a thread's at most, so that more blocks fit beside each other; one row of `multiplies` only. None: as many
            as the compiler wants.

    One row of `multiplies` (token_linear): k_slice is what the warps take of a row together, `piece` each; warps left over take
    other rows of the block, a pair or more each (for norm_gate_up: of a row of gate and one of up).
    """

    rows: int
    k_slice: int
    warps: int
    stages: int
    splits: int = 1
    ahead: int = 2
    registers: int | None = None


PIECE = 256
"""Words of two bytes that a warp takes of a row at a time, where tensor cores multiply one row."""

SINGLE: dict[tuple[Kernel, int, int], Tile] = {
    ("norm_linear", 12288, 4096): Tile(8, PIECE, 1, 1, ahead=3, registers=168),
}
"""Batch 1 on an H200, by kernel, out features (F for norm_gate_up) and in features; weights of two bytes. What else was timed
has the rule's tiles."""

BATCH: dict[tuple[Kernel, int, int], Tile] = {
    ("norm_linear", 12288, 4096): Tile(64, 128, 4, 4, splits=2),
    ("norm_linear", 6144, 4096): Tile(64, 512, 4, 3),
    ("norm_linear", 32000, 4096): Tile(64, 256, 4, 4),
    ("norm_linear", 128256, 4096): Tile(64, 512, 4, 3),
    ("norm_gate_up", 11008, 4096): Tile(64, 128, 4, 3),
    ("norm_gate_up", 14336, 4096): Tile(32, 256, 4, 3),
    ("proj_residual", 4096, 4096): Tile(64, 256, 4, 4, splits=2),
    ("proj_residual", 4096, 11008): Tile(64, 256, 4, 4, splits=2),
    ("proj_residual", 4096, 14336): Tile(64, 512, 4, 3, splits=2),
}
"""Batches of 2 to 16 on an H200. 64 rows (of gate and up together): with fewer, Triton has no wgmma for them. Slices of 32 KB
and more, since a turn of the loop costs as much for small ones; three of them leave room for a second block an SM, whose loads
are on their way while the first one waits."""

FP8_BATCH: dict[tuple[Kernel, int, int], Tile] = {
    ("norm_gate_up", 11008, 4096): Tile(64, 256, 8, 3),
    ("norm_gate_up", 14336, 4096): Tile(64, 256, 8, 3),
    ("proj_residual", 4096, 4096): Tile(64, 256, 4, 6, splits=4),
    ("proj_residual", 4096, 11008): Tile(128, 256, 8, 3, splits=8),
    ("proj_residual", 4096, 14336): Tile(64, 256, 4, 3, splits=8),
}
"""Batches of 2 to 16, FP8 weights; q, k and v by the rule."""

PROCESSORS = 132
"""SMs of an H200."""


@cache
def tile_for(kernel: Kernel, n: int, width: int, batch: int, itemsize: int, blocks: bool = False) -> Tile:
    """The tile of a kernel with weights `[n, width]` (n of gate alone for norm_gate_up) of `itemsize` bytes, for `batch` rows;
    itemsize 4 also of smaller weights, where x is float32. `blocks`: FP8 weights with scales for blocks of in features."""
    shape = (kernel, n, width)
    if batch > 1:
        return {1: FP8_BATCH, 2: BATCH, 4: {}}[itemsize].get(shape) or _batch_rule(kernel, n, width, itemsize)
    if itemsize == 1:
        return _fp8_single_rule(kernel, n, width, blocks)
    return {2: SINGLE, 4: {}}[itemsize].get(shape) or _single_rule(kernel, n, width, itemsize)


def multiplies(itemsize: int, width: int) -> bool:
    """Whether tensor cores multiply one row of x with weights `[n, width]` of `itemsize` bytes, as x has them or FP8."""
    return itemsize == 1 or (itemsize == 2 and width % PIECE == 0)


def piece(itemsize: float) -> int:
    """In features that a warp takes of a row at a time, where tensor cores multiply one row; itemsize 0.5: INT4."""
    return int(PIECE * 2 / itemsize)


def int4_single_tile(kernel: Kernel, n: int, width: int, group: int, zeros: bool) -> Tile:
    """One row's tile with INT4 weights `[n, width]` (n of gate alone for norm_gate_up), from what was fastest for Llama-2-7B
    and Llama-3.1-8B on an H200. A warp's rows, which share what it takes of x, are of one tile: eight at most."""
    own = piece(0.5)
    if kernel == "norm_gate_up":
        tile = Tile(4, 2 * own, 2, 1, ahead=2, registers=168)
    elif kernel == "norm_linear":
        tile = Tile(8, 4 * own, 4, 1, ahead=1, registers=112)
    elif width <= 8192:
        tile = Tile(8, 2 * own, 2, 1, ahead=2, registers=168)
    else:
        tile = Tile(4 if width <= 12288 else 2, 4 * own, 4, 1, ahead=3, registers=128 if width <= 12288 else 120)
    if group != 128 or zeros:  # scales of more groups, and zeros, are on their way as well
        rows = max(2, tile.rows // 2) if group == 32 else tile.rows
        tile = replace(tile, rows=rows, ahead=max(1, tile.ahead - 1), registers=min((tile.registers or 0) + 80, 255))
    k_slice = tile.k_slice
    while k_slice > own and k_slice // 2 >= width:
        k_slice //= 2
    return _cut_to(replace(tile, k_slice=k_slice), kernel, n, 0.5)


def _fp8_single_rule(kernel: Kernel, n: int, width: int, blocks: bool) -> Tile:
    """Warps take rows of their own, and more slices are on their way than of dense weights; scales of blocks are as well."""
    tile = Tile(4 if kernel == "norm_gate_up" else 8, piece(1), 4, 1, ahead=5, registers=96)
    if kernel == "proj_residual":
        tile = Tile(16, piece(1), 8, 1, ahead=6, registers=104) if width > 8192 else replace(tile, ahead=6, registers=104)
    if blocks:
        tile = replace(tile, ahead=tile.ahead - 1, registers=168)
    return _cut_to(tile, kernel, n, 1)


def _single_rule(kernel: Kernel, n: int, width: int, itemsize: int) -> Tile:
    """By tensor cores: a pair of rows a warp, or two, and registers that leave room for the next kernel's blocks; the warps of
    a block share a row after a norm, where many blocks follow each other, and take rows of their own elsewhere. Else: a warp a
    block, 16 bytes a thread, and four slices on their way; rows as registers allow."""
    if multiplies(itemsize, width):
        shared = width % (4 * PIECE) == 0
        if kernel == "proj_residual":
            tile = Tile(8, PIECE, 4, 1, ahead=5, registers=96 if shared else 104)
            if width > 8192:
                tile = Tile(16, PIECE, 8, 1, ahead=8, registers=128)
        elif kernel == "norm_gate_up":
            tile = Tile(2, 4 * PIECE, 4, 1, ahead=2, registers=96) if shared else Tile(4, PIECE, 4, 1, ahead=5, registers=104)
        elif n > 16384:  # an LM head
            tile = Tile(2, 4 * PIECE, 4, 1, ahead=4, registers=64) if shared else Tile(8, PIECE, 4, 1, ahead=5, registers=104)
        else:
            tile = Tile(8, PIECE, 4, 1, ahead=4, registers=72)
        return _cut_to(tile, kernel, n, itemsize)
    if width > 16384 and itemsize == 2:  # more than 64 slices spill under triton 3.9
        return Tile(min(2, n), 512, 2, 1, ahead=4)
    rows = {"norm_linear": 4, "proj_residual": 2, "norm_gate_up": 2}[kernel] * 2 // itemsize
    return Tile(min(max(rows, 1), _floor_power(n)), min(_floor_power(width), 256), 1, 1, ahead=4)


def _cut_to(tile: Tile, kernel: Kernel, n: int, itemsize: float) -> Tile:
    """The tile with no more rows than there are, and no warp without a pair of them."""
    rows = min(tile.rows, _floor_power(n))
    shared = tile.k_slice // piece(itemsize)
    return replace(tile, rows=rows, warps=min(tile.warps, rows // (1 if kernel == "norm_gate_up" else 2) * shared))


def _batch_rule(kernel: Kernel, n: int, width: int, itemsize: int) -> Tile:
    """Slices that divide a row, 64 rows a block, and for a projection splits where blocks leave SMs without work."""
    divisor = width & -width
    if itemsize == 1:
        tile = _batch_rule(kernel, n, width, 2)
        if kernel == "norm_gate_up":  # eight warps need 64 rows of each
            rows = min(64, max(16, _floor_power(n)))
            return replace(tile, rows=rows, k_slice=min(256, max(divisor, tile.k_slice)), warps=8)
        if kernel == "norm_linear":  # about two blocks an SM; an LM head is not split
            rows, k_slice, splits = min(128, max(16, _floor_power(n))), min(256, tile.k_slice), 1
            while splits < 4 and -(-n // rows) * splits <= PROCESSORS and splits_fit(width // k_slice, 2 * splits):
                splits *= 2
            return Tile(rows, k_slice, 8 if rows == 128 else 4, 3, splits)
        return replace(tile, stages=5)
    rows = min(64, max(16, _floor_power(n)))
    blocks = -(-n // rows)
    if itemsize > 2:
        return Tile(16, min(32, max(16, _floor_power(width))), 4, 2)
    stages = 3
    if divisor < 32:
        k_slice = min(32, max(16, _floor_power(width)))
    elif kernel == "norm_gate_up":
        k_slice = min(128, divisor)
        if blocks > PROCESSORS * 3 // 2 and divisor >= 256:  # half as large: a second wave costs less
            rows, k_slice = 32, 256
    else:  # about 100 KB where blocks are many, so that two fit an SM, and more where each has one of its own
        k_slice = min(512 if blocks <= PROCESSORS else 256, divisor)
        stages = 3 if k_slice == 512 or blocks > PROCESSORS else 4
    splits = 1
    while kernel == "proj_residual" and splits < 4 and blocks * splits < PROCESSORS * 3 // 4:
        if not splits_fit(width // k_slice, splits * 2):
            break
        splits *= 2
    return Tile(rows, k_slice, 4, stages, splits)


def fits(tile: Tile, kernel: str, n: int, width: int, single: bool, itemsize: int) -> bool:
    """Whether a tile is one for weights `[n, width]`, as its attributes say, and leaves no split without a slice."""
    powers = (tile.rows, tile.k_slice, tile.warps)
    if any(each & (each - 1) for each in powers) or min(*powers, tile.stages, tile.splits) < 1:
        return False
    if tile.rows > n or tile.k_slice > (max(width, piece(1)) if single and itemsize == 1 else width):
        return False
    if single and tile.splits > 1:
        return False
    if single and multiplies(itemsize, width):
        pair = 1 if kernel == "norm_gate_up" else 2
        own = piece(itemsize)
        whole = tile.k_slice % own == 0 and (itemsize == 1 or width % tile.k_slice == 0) and tile.warps * own >= tile.k_slice
        return whole and tile.ahead > 0 and tile.rows * tile.k_slice >= pair * tile.warps * own
    if single:
        return tile.ahead > 0
    least, most = (32, 512) if itemsize == 1 else (16, width)
    return tile.rows >= 16 and least <= tile.k_slice <= most and splits_fit(width // tile.k_slice, tile.splits)


def splits_fit(slices: int, splits: int) -> bool:
    """Whether each split gets at least one slice when all but the last take the same number."""
    return -(-slices // splits) * (splits - 1) < slices


def _floor_power(n: int) -> int:
    return 1 << (n.bit_length() - 1)
