"""Owns a batch's products with INT4 weights, which are the projections of a layer; embedding and LM head stay dense.

Does not own one token's (token_linear), how the weights lie in memory (lowbit) or what the dense kernels share (_gemv).

A weight is converted once for all tokens: a lane's 16 bytes become its operands by a few logical operations on pairs of
weights, and 8 is taken off each pair.
"""

from dataclasses import dataclass, replace
from typing import Any  # noqa: F401 (comments tell types)

import torch
from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    TOKENS,
    Scaled,
    as_words,
    dot_dtype,
    from_words,
    inverse_rms,
    launch_options,
    let_next_start,
    load_squares,
    named_by_place,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.lowbit import TILE_WIDTH, LowBit, codes, word_operands

CENTERED = """{{
    .reg .b32 a, b, c, d; shr.b32 a, $4, 8; mov.b32 b, {raise}; mov.b32 c, {raise16}; mov.b32 d, {eight};
    and.b32 $0, $4, 0x000f000f; fma.rn.{type} $0, $0, b, d; and.b32 $1, $4, 0x00f000f0; fma.rn.{type} $1, $1, c, d;
    and.b32 $2, a, 0x000f000f; fma.rn.{type} $2, $2, b, d; and.b32 $3, a, 0x00f000f0; fma.rn.{type} $3, $3, c, d;
}}"""
BF16 = {"raise": "0x7f007f00", "raise16": "0x7d007d00", "eight": "0xbe00be00", "type": "bf16x2"}  # 2^127, 2^123, -8 * 2^-6
FP16 = {"raise": "0x78007800", "raise16": "0x68006800", "eight": "0xa400a400", "type": "f16x2"}  # 2^15, 2^11, -8 * 2^-9
BF16_CENTERED, FP16_CENTERED = tl.constexpr(CENTERED.format(**BF16)), tl.constexpr(CENTERED.format(**FP16))

CENTERED_UNIT = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""What a weight of 1 is for `_centered`."""


FEW_PROGRAMS = 160
"""Programs below which the in features are split: an H200 has 132 SMs."""


@triton.jit
def _centered(words, DOT_DTYPE: tl.constexpr):
    """The words' codes less 8 for each of four operands; of types of 2 bytes, times `CENTERED_UNIT`."""
    if tl.float32 == DOT_DTYPE:
        a, b, c, d = codes(words, DOT_DTYPE)
        parts = (a - 8.0, b / 16.0 - 8.0, c - 8.0, d / 16.0 - 8.0)
    elif tl.bfloat16 == DOT_DTYPE:
        parts = word_operands(words, BF16_CENTERED, DOT_DTYPE)
    else:
        parts = word_operands(words, FP16_CENTERED, DOT_DTYPE)
    return parts


@triton.jit
def _step_tokens(x_ptr, live, step, IN: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr, SPAN: tl.constexpr):
    """Words of x for each of the COUNT groups of a step, from pointers to tokens `[TOKENS, 1]`; 0 past the end. IN, K and SPAN
    count words. In spans `[TOKENS, K / SPAN, SPAN]` of 128 bytes, of which a warp takes one of four tokens: it stores those to
    all banks of shared memory, and two of two tokens to half of them."""
    read = ()  # type: tuple[Any, ...]
    place = (tl.arange(0, K // SPAN) * SPAN)[None, :, None] + tl.arange(0, SPAN)[None, None, :]
    for i in tl.static_range(COUNT):
        k = (step * COUNT + i) * K + place
        mask = live[:, :, None] & (k < IN) if IN % (COUNT * K) else live[:, :, None]
        read = read + (tl.load(x_ptr[:, :, None] + k, mask=mask, other=0),)  # noqa: RUF005
    return read


@triton.jit
def _operand_tokens(words, DTYPE: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """x `[K, TOKENS]` of a group, in the order in which weights are operands."""
    TOKENS: tl.constexpr = words.shape[0]
    x = from_words(tl.reshape(words, [TOKENS, words.shape[1] * words.shape[2]]), DTYPE)
    WIDTH: tl.constexpr = x.shape[1]
    x = tl.reshape(x, [TOKENS, WIDTH // 32, 4, 2, 2, 2])  # 32 in features, lane of four, operand, half, pair
    x = tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), [TOKENS, WIDTH])
    return tl.trans(x.to(DOT_DTYPE))


@triton.jit
def _step_rows(ptr, step, STRIDE: tl.constexpr, GROUPS: tl.constexpr, COUNT: tl.constexpr):
    """Words of scales or zeros for each of the COUNT groups of a step, from pointers to rows; past the end the last again."""
    read = ()  # type: tuple[Any, ...]
    for i in tl.static_range(COUNT):
        group = step * COUNT + i
        if GROUPS % COUNT:
            group = tl.minimum(group, GROUPS - 1)
        read = read + (tl.load(ptr + group * STRIDE),)  # noqa: RUF005
    return read


@triton.jit
def _own_number(words, r, DTYPE: tl.constexpr):
    """The r-th number of those that share a word."""
    PER: tl.constexpr = 32 // DTYPE.primitive_bitwidth
    if PER == 1:
        number = words
    else:
        BITS: tl.constexpr = tl.int16 if PER == 2 else tl.uint8
        number = (words >> r % PER * (32 // PER)).to(BITS).to(DTYPE, bitcast=True)
    return number.to(tl.float32)


@triton.jit
def _operand(parts, half: tl.constexpr, HALVES: tl.constexpr, BLOCKS: tl.constexpr):
    """Rows `[16 * BLOCKS, 128 / HALVES]` of a part of a tile's in features, all, a half or a quarter, from its words' codes."""
    # block, tile, g, lane t, operand's middle bit, half, pair, then the lower bit, then the upper
    if HALVES == 1:
        w = tl.join(tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3]))
        w = tl.permute(tl.reshape(w, [BLOCKS, 2, 8, 4, 2, 2, 2, 2, 2]), (0, 1, 2, 8, 4, 7, 5, 3, 6))
    else:
        w = tl.join(parts[half * 2 // HALVES * 2], parts[half * 2 // HALVES * 2 + 1])
        w = tl.permute(tl.reshape(w, [BLOCKS, 2, 8, 4, 2, 2, 2, 2]), (0, 1, 2, 4, 7, 5, 3, 6))
        if HALVES == 4:
            low, high = tl.split(tl.permute(w, (0, 1, 2, 4, 5, 6, 7, 3)))
            w = low if half % 2 == 0 else high
    return tl.reshape(w, [16 * BLOCKS, 128 // HALVES])


@triton.jit
def _load_fixed(row, n, bias_ptr, norm_ptr, GATED: tl.constexpr):
    """What `_finish` needs of weights: rows' bias, that of up and the next norm's weight, as they are stored."""
    bias, up_bias, norm = tl.zeros_like(row), tl.zeros_like(row), tl.zeros_like(row)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=row < n, other=0.0)
        if GATED:
            up_bias = tl.load(bias_ptr + n + row, mask=row < n, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + row, mask=row < n, other=0.0)
    return bias, up_bias, norm


@triton.jit
def _load_residual(residual_ptr, row, b, batch, n):
    """Rows `[rows, tokens]` of the residual, as they are stored; 0 where there is none."""
    residual = tl.zeros_like(row)[:, None]
    if residual_ptr is not None:
        mask = (b < batch)[None, :] & (row < n)[:, None]
        residual = tl.load(residual_ptr + b[None, :].to(tl.int64) * n + row[:, None], mask=mask, other=0.0)
    return residual


@triton.jit
def _finish(sum, up, fixed, residual, row, own, b, batch, n, out_ptr, scaled_ptr, GATED: tl.constexpr, SCALE: tl.constexpr):
    """Store rows' sums `[rows, tokens]` with bias and residual, or silu(sum) * up; fixed, residual: of `_load_fixed` and
    `_load_residual`. With a residual the next norm begins, as in proj_residual: the rows times its weight are stored too, and
    each token's sum of squares over its `own` rows returned."""
    bias, up_bias, norm = fixed
    at = b[None, :].to(tl.int64) * n + row[:, None]
    mask = (b < batch)[None, :] & (row < n)[:, None]
    sum += bias.to(tl.float32)[:, None]
    if GATED:
        sum = sum / (1.0 + tl.exp(-sum)) * (up + up_bias.to(tl.float32)[:, None])
    x = (sum + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, x, mask=mask)
    x = x.to(tl.float32)
    if scaled_ptr is not None:
        tl.store(scaled_ptr + at, (x * norm.to(tl.float32)[:, None] * SCALE).to(out_ptr.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask & own[:, None], x * x, 0.0), 0)


@triton.jit(do_not_specialize=["batch", "n", "blocks"], repr=named_by_place("lowbit_batch"))
def _lowbit_batch_kernel(
    x_ptr, squares_ptr, tiles_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
    out_squares_ptr, partial_ptr, counter_ptr, batch, n, blocks, eps,
    IN: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr,
    UNIT: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, DOT_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    K: tl.constexpr = 128 // HALVES
    STEPS: tl.constexpr = (GROUPS + COUNT - 1) // COUNT
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    program, split = tl.program_id(0), tl.program_id(1)
    block = tl.minimum(program * NEAR, blocks - NEAR)
    b = tl.arange(0, TOKENS)
    r = tl.arange(0, 16 * BLOCKS)
    i = tl.arange(0, BLOCKS * 512)
    far = r // 16 % NEAR + r // (16 * NEAR) * blocks
    tile_at = i // 256 % (2 * NEAR) + i // (512 * NEAR) * (2 * blocks)
    tiles_ptr += block.to(tl.int64) * (WIDE * 512) + tile_at * (WIDE * 256) + i % 256
    row_at = (block + far) * (GROUPS * 16) + r % 16
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALE_DTYPE: tl.constexpr = scales_ptr.dtype.element_ty
    PER_X: tl.constexpr = 32 // X_DTYPE.primitive_bitwidth
    SPAN: tl.constexpr = min(64, K) // PER_X
    PER_SCALE: tl.constexpr = 32 // SCALE_DTYPE.primitive_bitwidth
    x_ptr = as_words(x_ptr) + b[:, None] * (IN // PER_X)
    scales_ptr = as_words(scales_ptr) + row_at // PER_SCALE
    if zeros_ptr is not None:
        zeros_ptr = as_words(zeros_ptr) + row_at // 4
    live = (b < batch)[:, None]
    first = STEPS * split // SPLITS
    end = STEPS * (split + 1) // SPLITS
    total = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
    ones = tl.full((16 * BLOCKS, K), UNIT, DOT_DTYPE)
    factor = tl.full((TOKENS,), 1.0 / UNIT, tl.float32)
    next_x = ()  # type: tuple[Any, ...]
    for _ in tl.static_range(COUNT):
        next_x = next_x + (tl.zeros((TOKENS, K // PER_X // SPAN, SPAN), x_ptr.dtype.element_ty),)  # noqa: RUF005
    # Scales are too small to be copied as tiles are, in the background: each step reads those of the next.
    next_scales = _step_rows(scales_ptr, first, 16 // PER_SCALE, GROUPS, COUNT)
    next_zeros = next_scales
    if zeros_ptr is not None:
        next_zeros = _step_rows(zeros_ptr, first, 4, GROUPS, COUNT)
    for step in range(first, end):
        words = ()  # type: tuple[Any, ...]
        for g in tl.static_range(COUNT // HALVES):
            tile = step * (COUNT // HALVES) + g
            if WIDE % (COUNT // HALVES):
                tile = tl.minimum(tile, WIDE - 1)
            words = words + (tl.load(tiles_ptr + tile * 256, eviction_policy="evict_first"),)  # noqa: RUF005
        if step == first:
            wait_for_previous(PDL)
            next_x = _step_tokens(x_ptr, live, step, IN // PER_X, K // PER_X, COUNT, SPAN)
            if PARTS > 0:
                factor *= inverse_rms(load_squares(squares_ptr, b, PARTS), eps, IN, SCALE)
        following = tl.minimum(step + 1, STEPS - 1)
        xs = ()  # type: tuple[Any, ...]
        scales = ()  # type: tuple[Any, ...]
        zeros = ()  # type: tuple[Any, ...]
        for g in tl.static_range(COUNT):
            xs = xs + (_operand_tokens(next_x[g], X_DTYPE, DOT_DTYPE),)  # noqa: RUF005
            scales = scales + (_own_number(next_scales[g], r, SCALE_DTYPE)[:, None],)  # noqa: RUF005
            if zeros_ptr is not None:
                zeros = zeros + (_own_number(next_zeros[g], r, tl.uint8)[:, None] - 8.0,)  # noqa: RUF005
        next_x = _step_tokens(x_ptr, live, following, IN // PER_X, K // PER_X, COUNT, SPAN)
        next_scales = _step_rows(scales_ptr, following, 16 // PER_SCALE, GROUPS, COUNT)
        if zeros_ptr is not None:
            next_zeros = _step_rows(zeros_ptr, following, 4, GROUPS, COUNT)
        for g in tl.static_range(COUNT // HALVES):
            parts = _centered(words[g], DOT_DTYPE)
            for half in tl.static_range(HALVES):
                w = _operand(parts, half, HALVES, BLOCKS)
                acc = tl.dot(w, xs[g * HALVES + half], input_precision="ieee")
                if zeros_ptr is not None:
                    sums = tl.dot(ones, xs[g * HALVES + half], input_precision="ieee")
                    acc -= zeros[g * HALVES + half] * sums
                total += acc * scales[g * HALVES + half]
    total *= factor[None, :]
    row = block * 16 + tl.arange(0, 16 * NEAR)
    fixed = _load_fixed(row, n, bias_ptr, norm_ptr, GATED)  # while the splits meet
    residual = _load_residual(residual_ptr, row, b, batch, n)
    arrived = SPLITS
    if SPLITS > 1 and counter_ptr is None:  # a reader adds the splits' sums
        out_ptr += split.to(tl.int64) * batch * n
        bias, up_bias, norm = fixed
        fixed = tl.where(split == 0, bias.to(tl.float32), 0.0), up_bias, norm
    elif SPLITS > 1:
        # The last split of a block of rows to arrive sums all of them in split order: the bits do not depend on which it is.
        cell = r[:, None] * TOKENS + b[None, :]
        partial_ptr += program * (SPLITS * 16 * BLOCKS * TOKENS)
        tl.store(partial_ptr + split * (16 * BLOCKS * TOKENS) + cell, total)
        tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
        arrived = tl.atomic_add(counter_ptr + program, 1, sem="acq_rel") + 1
        if arrived == SPLITS:
            total = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(partial_ptr + part * (16 * BLOCKS * TOKENS) + cell, cache_modifier=".cg")
            tl.store(counter_ptr + program, 0)
    if arrived == SPLITS:
        if GATED:
            sum, up = tl.split(tl.permute(tl.reshape(total, [2, 16 * NEAR, TOKENS]), (1, 2, 0)))
        else:
            sum, up = total, total
        own = row >= program * (NEAR * 16)
        squares = _finish(sum, up, fixed, residual, row, own, b, batch, n, out_ptr, scaled_ptr, GATED, SCALE)
        if residual_ptr is not None:
            tl.store(out_squares_ptr + program * TOKENS + b, squares)


@dataclass(frozen=True)
class LowBitTile:
    """How a batch's product is cut: all warps take a step together, with `stages` steps on their way or at work, all but one of
    them before the wait.

    Attributes:
        blocks: of 16 rows, that one program takes (for gate and up, of both together).
        tiles: of a step, each of 128 in features.
        splits: programs that share a row's in features.
    """

    blocks: int
    warps: int
    tiles: int
    stages: int
    splits: int = 1


def lowbit_tile(weight: LowBit, gated: bool = False) -> LowBitTile:
    """The rule for every shape, from what was fastest for the products of Llama-2-7B and Llama-3.1-8B on an H200: 128 rows, or
    64 of gate and up together, and splits where that makes too few programs; two tiles a step where each split has four such
    steps, else one and more steps on their way, and with groups of 32, which are four products each."""
    blocks, _, wide = weight.tiles.shape[:3]
    made = LowBitTile(4, 4, 1, 6) if gated else LowBitTile(8, 8, 1, 6)
    while made.blocks > (2 if gated else 1) and blocks < made.blocks:
        made = replace(made, blocks=made.blocks // 2)
    while made.splits < 8 and blocks // made.blocks * made.splits < FEW_PROGRAMS and wide >= 4 * made.splits:
        made = replace(made, splits=made.splits * 2)
    return replace(made, tiles=2, stages=4) if wide >= 8 * made.splits and weight.group > 32 else made


def lowbit_batch(
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
    """x `[B, in]` -> out `[B, N]` = linear(x), B 2 to 16, summed in float32, rounded once to out's type; without a `counter`
    `[P, B, N]`, whose sum over the P splits it is. With `scaled`, of the norm begun there; with `residual [B, N]`, added to it,
    and `next_norm [C]` begun in `next_scaled`; `gated`: silu of the first half of the rows times the second, `[B, N / 2]`.
    partial, counter, full_edge: as in proj_residual and norm_linear.

    Bytes: the tiles and scales, once; x and out stay in L2. Torch twin: the op's, with `dense`.
    """
    weight, batch = linear.weight, len(x)
    assert isinstance(weight, LowBit)
    all_blocks, _, wide = weight.tiles.shape[:3]
    blocks, n = (all_blocks // 2, weight.shape[0] // 2) if gated else (all_blocks, weight.shape[0])
    programs = triton.cdiv(blocks, tile.blocks // 2 if gated else tile.blocks)
    begun, halves = scaled if scaled is not None else next_scaled, TILE_WIDTH // weight.group
    _lowbit_batch_kernel[(programs, tile.splits)](
        *((x, None) if scaled is None else (scaled.x, scaled.squares)),
        *(weight.tiles, weight.scales, weight.zeros, linear.bias, residual, out),
        *((None, None, None) if next_scaled is None else (next_norm, next_scaled.x, next_scaled.squares)),
        *(partial, counter, batch, n, blocks, eps),
        IN=weight.shape[1],
        WIDE=wide,
        GROUPS=weight.scales.shape[1],
        HALVES=halves,
        PARTS=len(scaled.squares) if scaled is not None else 0,
        SCALE=begun.scale if begun is not None else 1.0,
        UNIT=1.0 if interpreted else CENTERED_UNIT.get(x.dtype, 1.0),
        GATED=gated,
        BLOCKS=tile.blocks,
        COUNT=tile.tiles * halves,
        SPLITS=tile.splits,
        TOKENS=TOKENS,
        DOT_DTYPE=dot_dtype(x.dtype, interpreted),
        PDL=pdl,
        **launch_options(tile.warps, tile.stages, pdl and not full_edge),
    )
    return out
