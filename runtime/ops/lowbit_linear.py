"""Owns the products with INT4 weights, which are the projections of a layer; embedding and LM head stay dense.

Does not own how the weights lie in memory (lowbit) or what the dense kernels share (_gemv).

A conversion for each weight and a multiplication for each weight are more than a GPU can issue while memory delivers them. So
the tensor cores multiply, for one token too: a lane's 16 bytes of weights become its operands by a few logical operations on
pairs of weights, and the token is the other operand, eight times over. For one token even taking 8 off the codes is left to
them, as a product of a constant; in a batch, where a weight is converted once for all tokens, it is taken off each pair.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    RAISED,
    TOKENS,
    Scaled,
    ask_before,
    dot_dtype,
    inverse_rms,
    launch_options,
    let_next_start,
    load_squares,
    named_by_place,
    wait_for_previous,
)
from runtime.ops._lowbit import codes, finish, load_fixed, load_residual
from runtime.ops._triton import tl, triton
from runtime.ops.lowbit import TILE_WIDTH, LowBit
from runtime.ops.lowbit_batch import CENTERED_UNIT, lowbit_batch_kernel

COLUMNS = 8
"""Token columns of the smallest tensor core product: one token fills them all."""

SMALLEST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""The smallest number of a type, which a code of 1 is for `codes`."""

FEW_PROGRAMS = 160
"""Programs below which a batch splits the in features: an H200 has 132 SMs."""

SHORT_STEP = 128
"""In features of a batch's shorter steps; the longer ones are of twice as many."""


@triton.jit
def _load_step(
    tiles_ptr, scales_ptr, zeros_ptr, step, far,
    BLOCKS: tl.constexpr, NEAR: tl.constexpr, S: tl.constexpr, KS: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    HALVES: tl.constexpr,
):  # fmt: skip
    """What one step of the kernel for one token reads of each of BLOCKS blocks of rows, NEAR next to each other and the next
    NEAR `far` on: S tiles, then HALVES scales `[KS, 16]`, then zeros. Past the end of a row: its last again; x is 0 there."""
    i = tl.arange(0, KS * 256)
    group = tl.arange(0, KS)
    warp = i // 256
    if (step + 1) * KS * S > WIDE:
        group, warp = tl.minimum(group, WIDE // S - 1 - step * KS), tl.minimum(warp, WIDE // S - 1 - step * KS)
    # What is the same for all steps comes first and constants last: those are part of the load.
    tile_ptrs = tiles_ptr + warp * (S * 256) + i % 256
    at = group[:, None] * (HALVES * 16) + tl.arange(0, 16)[None, :]
    read = ()  # type: tuple[Any, ...]
    for b in tl.static_range(BLOCKS):
        block = b % NEAR + b // NEAR * far
        for s in tl.static_range(S):
            tile_at = block * (WIDE * 256) + (step * (KS * S) + s) * 256
            read = read + (tl.load(tile_ptrs + tile_at, eviction_policy="evict_first"),)  # noqa: RUF005
        for j in tl.static_range(HALVES if zeros_ptr is None else 2 * HALVES):
            scale_ptrs = (scales_ptr if j < HALVES else zeros_ptr) + at
            read = read + (tl.load(scale_ptrs + block * (GROUPS * 16) + (step * (KS * HALVES) + j % HALVES) * 16),)  # noqa: RUF005
    return read


@triton.jit(do_not_specialize=["batch", "n", "blocks"], repr=named_by_place("lowbit"))
def _lowbit_kernel(
    x_ptr, squares_ptr, tiles_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
    out_squares_ptr, batch, n, blocks, eps,
    IN: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr,
    RAISE: tl.constexpr, UNIT: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr, S: tl.constexpr, KS: tl.constexpr,
    AHEAD: tl.constexpr, COLUMNS: tl.constexpr, DOT_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    OPERANDS: tl.constexpr = 4 // HALVES
    STEPS: tl.constexpr = (WIDE + KS * S - 1) // (KS * S)
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    LOADS: tl.constexpr = S + HALVES * (2 if HAS_ZEROS else 1)
    program = tl.program_id(0)
    # Blocks of rows that the last two programs share get the same bits twice.
    block = tl.minimum(program * NEAR, blocks - NEAR)
    tiles_ptr += block.to(tl.int64) * (WIDE * 256)
    scales_ptr += block * (GROUPS * 16)
    if zeros_ptr is not None:
        zeros_ptr += block * (GROUPS * 16)
    read = ()  # type: tuple[Any, ...]
    for step in tl.static_range(AHEAD):
        read = read + _load_step(tiles_ptr, scales_ptr, zeros_ptr, step, blocks, BLOCKS, NEAR, S, KS, WIDE, GROUPS, HALVES)
    # No block ends with a load from memory. What these read is converted where it is used: a conversion waits for it.
    b = tl.arange(0, 1)
    fixed = ()  # type: tuple[Any, ...]
    for i in tl.static_range(NEAR):
        fixed = fixed + (load_fixed((block + i) * 16 + tl.arange(0, 16), n, bias_ptr, norm_ptr, GATED),)  # noqa: RUF005
    wait_for_previous(PDL)
    residual = ()  # type: tuple[Any, ...]
    for i in tl.static_range(NEAR):
        residual = residual + (load_residual(residual_ptr, (block + i) * 16 + tl.arange(0, 16), b, batch, n),)  # noqa: RUF005
    begun = 0.0
    if PARTS > 0:
        begun = load_squares(squares_ptr, b, PARTS)
    ask_before(PDL)
    total = ()  # type: tuple[Any, ...]
    for _ in tl.static_range(BLOCKS):
        total = total + (tl.zeros((KS, 16, COLUMNS), tl.float32),)  # noqa: RUF005
    nothing = tl.zeros((KS, 16, COLUMNS), tl.float32)
    # As `codes` would make it of 1, or of -8. By its bits: compilers lose numbers so small.
    constant = tl.full((KS, 16, 16), 1.0 if HAS_ZEROS else -8.0, DOT_DTYPE)
    if tl.float32 != DOT_DTYPE:
        constant = tl.full((KS, 16, 16), 1 if HAS_ZEROS else -0x7FF8, tl.int16).to(DOT_DTYPE, bitcast=True)
    k = tl.arange(0, KS)[:, None] * (S * 64) + tl.arange(0, 16)[None, :]
    for step in tl.static_range(STEPS):
        own = read[: BLOCKS * LOADS]
        read = read[BLOCKS * LOADS :]
        if step + AHEAD < STEPS:
            at = step + AHEAD
            read = read + _load_step(tiles_ptr, scales_ptr, zeros_ptr, at, blocks, BLOCKS, NEAR, S, KS, WIDE, GROUPS, HALVES)
        for half in tl.static_range(HALVES):
            # Of 16 in features, fewer than a warp has lanes: Triton loads x where the product wants it.
            xs = ()  # type: tuple[Any, ...]
            offset = nothing
            for j in tl.static_range(OPERANDS * S):
                at = step * (KS * S * 64) + j // OPERANDS * 64 + (half * OPERANDS + j % OPERANDS) * 16
                if (step + 1) * KS * S * 64 > IN:
                    x = tl.load(x_ptr + k + at, mask=k < IN - at, other=0.0)
                else:
                    x = tl.load(x_ptr + k + at)
                x = x.to(DOT_DTYPE)
                if RAISE != 1.0:
                    x *= RAISE
                x = tl.broadcast_to(x[:, :, None], [KS, 16, COLUMNS])
                offset = tl.dot(constant, x, offset, input_precision="ieee")
                xs = xs + (x,)  # noqa: RUF005
            sums = ()  # type: tuple[Any, ...]
            for i in tl.static_range(BLOCKS):
                even = nothing if HAS_ZEROS else offset
                odd = nothing
                for s in tl.static_range(S):
                    words = tl.reshape(own[i * LOADS + s], [KS, 8, 4, 2, 2, 2])  # g, lane t, half k, half row, pair
                    parts = codes(tl.reshape(tl.permute(words, (0, 4, 1, 3, 2, 5)), [KS, 16, 16]), DOT_DTYPE)
                    for j in tl.static_range(OPERANDS):
                        w = parts[half * OPERANDS + j]
                        if j % 2 == 0:
                            even = tl.dot(w, xs[s * OPERANDS + j], even, input_precision="ieee")
                        else:
                            odd = tl.dot(w, xs[s * OPERANDS + j], odd, input_precision="ieee")
                group_sum = even + odd * 0.0625
                if HAS_ZEROS:
                    group_sum -= own[i * LOADS + S + HALVES + half].to(tl.float32)[:, :, None] * offset
                scale = own[i * LOADS + S + half].to(tl.float32)
                sums = sums + (total[i] + group_sum * scale[:, :, None],)  # noqa: RUF005
            total = sums

    factor = tl.full((1,), 1.0 / UNIT, tl.float32)
    if PARTS > 0:
        factor *= inverse_rms(begun, eps, IN, 1.0)
    squares = tl.zeros((1,), tl.float32)
    for i in tl.static_range(NEAR):
        sum = tl.sum(tl.max(total[i], 2), 0)[:, None] * factor[None, :]  # the columns are equal
        up = tl.sum(tl.max(total[BLOCKS - NEAR + i], 2), 0)[:, None] * factor[None, :] if GATED else sum
        row = (block + i) * 16 + tl.arange(0, 16)
        own = row >= program * (NEAR * 16)
        squares += finish(sum, up, fixed[i], residual[i], row, own, b, batch, n, out_ptr, scaled_ptr, GATED, SCALE)
    if residual_ptr is not None:
        tl.store(out_squares_ptr + program + b, squares)


@dataclass(frozen=True)
class LowBitTile:
    """How a product is cut. One token: each of a program's `warps` takes scale groups of its own, and asks for the first
    `ahead` of them before the wait. A batch: all warps take a step of `groups` scale groups together, with `stages` steps on
    their way or at work, all but one of them before the wait.

    Attributes:
        blocks: of 16 rows, that one program takes (for gate and up, of both together).
        registers: a thread's at most, so that more programs fit beside each other; None: as many as the compiler wants.
        groups: of a step, each of 64 in features at least; as `stages` and `splits` for batches only.
        splits: programs that share a row's in features.
    """

    blocks: int
    warps: int
    ahead: int = 1
    registers: int | None = None
    groups: int = 1
    stages: int = 1
    splits: int = 1


def lowbit_tile(weight: LowBit, batch: int, gated: bool = False) -> LowBitTile:
    """The rule for every shape, from what was fastest for the products of Llama-2-7B and Llama-3.1-8B on an H200. One token:
    few warps where blocks of rows are many. A batch: 128 rows, or 64 of gate and up together, and splits where that makes too
    few programs; 256 in features a step where each split has four such steps, else 128 and more steps on their way."""
    blocks, steps = weight.tiles.shape[0], -(-weight.tiles.shape[1] // _tiles(weight))
    if batch == 1:
        warps = 8 if gated or steps > 32 else 4 if blocks >= 512 else 16
        while warps > steps:
            warps //= 2
        if gated:  # two programs beside each other; other formats, and a last step that is not whole, would spill
            plain = weight.group == 128 and weight.zeros is None and steps % warps == 0
            return LowBitTile(2, warps, 1, registers=128 if plain else None)
        return LowBitTile(1, warps, min(4, -(-steps // warps)))
    made = LowBitTile(4, 4) if gated else LowBitTile(8, 8)
    while made.blocks > (2 if gated else 1) and blocks < made.blocks:
        made = replace(made, blocks=made.blocks // 2)
    short = -(-weight.tiles.shape[1] * TILE_WIDTH // SHORT_STEP)
    while made.splits < 8 and blocks // made.blocks * made.splits < FEW_PROGRAMS and short >= 4 * made.splits:
        made = replace(made, splits=made.splits * 2)
    groups = SHORT_STEP // max(weight.group, TILE_WIDTH)
    if short >= 8 * made.splits:
        return replace(made, groups=2 * groups, stages=4)
    return replace(made, groups=groups, stages=6)


def _tiles(weight: LowBit) -> int:
    """Tiles of a step: those of a scale group, or one that holds two of them."""
    return max(1, weight.group // TILE_WIDTH)


def lowbit_linear(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    tile: LowBitTile,
    pdl: bool,
    interpreted: bool = False,
    scaled: Scaled | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    next_scaled: Scaled | None = None,
    partial: Tensor | None = None,
    counter: Tensor | None = None,
    gated: bool = False,
    full_edge: bool = False,
) -> Tensor:
    """x `[B, in]` -> out `[B, N]` = linear(x), summed in float32, rounded once to out's type; without a `counter` `[P, B, N]`,
    whose sum over the P splits it is. With `scaled`, of the norm begun there; with `residual [B, N]`, added to it, and
    `next_norm [C]` begun in `next_scaled`; `gated`: silu of the first half of the rows times the second, `[B, N / 2]`. partial,
    counter, full_edge: as in proj_residual and norm_linear.

    Bytes: the tiles and scales, once; x and out stay in L2. Torch twin: the op's, with `dense`.
    """
    weight, batch = linear.weight, len(x)
    assert isinstance(weight, LowBit)
    all_blocks, wide = weight.tiles.shape[:2]
    blocks, n = (all_blocks // 2, weight.shape[0] // 2) if gated else (all_blocks, weight.shape[0])
    programs = triton.cdiv(blocks, tile.blocks // 2 if gated else tile.blocks)
    begun = scaled if scaled is not None else next_scaled
    tensors = (
        *((x, None) if scaled is None else (scaled.x, scaled.squares)),
        *(weight.tiles, weight.scales, weight.zeros, linear.bias, residual, out),
        *((None, None, None) if next_scaled is None else (next_norm, next_scaled.x, next_scaled.squares)),
    )
    shape: dict[str, Any] = {
        "IN": weight.shape[1],
        "WIDE": wide,
        "GROUPS": weight.scales.shape[1],
        "HALVES": max(1, TILE_WIDTH // weight.group),
        "PARTS": len(scaled.squares) if scaled is not None else 0,
        "SCALE": begun.scale if begun is not None else 1.0,
        "GATED": gated,
        "BLOCKS": tile.blocks,
        "S": _tiles(weight),
        "DOT_DTYPE": dot_dtype(x.dtype, interpreted),
        "PDL": pdl,
        "maxnreg": tile.registers,
    } | launch_options(tile.warps, tile.stages, pdl and not full_edge)
    if batch == 1:
        raised = scaled.scale if scaled is not None else 1.0 if interpreted else RAISED.get(x.dtype, 1.0)
        unit = (1.0 if interpreted else SMALLEST.get(x.dtype, 1.0)) * raised
        shape |= {
            "KS": tile.warps,
            "AHEAD": tile.ahead,
            "COLUMNS": COLUMNS,
            "RAISE": raised if scaled is None else 1.0,
            "UNIT": unit,
        }
        _lowbit_kernel[(programs,)](*tensors, batch, n, blocks, eps, **shape)
        return out
    unit = 1.0 if interpreted else CENTERED_UNIT.get(x.dtype, 1.0)
    shape |= {"COUNT": tile.groups * shape["HALVES"], "SPLITS": tile.splits, "TOKENS": TOKENS, "UNIT": unit}
    lowbit_batch_kernel[(programs, tile.splits)](*tensors, partial, counter, batch, n, blocks, eps, **shape)
    return out
