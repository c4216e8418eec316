"""Owns the kernel for a batch's products with INT4 weights, which `lowbit_linear` launches.

A weight is converted once for all tokens, so 8 is taken off each pair of codes.
"""

from typing import Any  # noqa: F401 (comments tell types)

import torch

from runtime.ops._gemv import (
    as_words,
    from_words,
    inverse_rms,
    let_next_start,
    load_squares,
    named_by_place,
    wait_for_previous,
)
from runtime.ops._lowbit import codes, finish, load_fixed, load_residual, word_operands
from runtime.ops._triton import tl, triton

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
def _step_tokens(x_ptr, live, step, IN: tl.constexpr, K: tl.constexpr, COUNT: tl.constexpr):
    """Words `[TOKENS, K]` of x for each of the COUNT groups of a step, from pointers to tokens `[TOKENS, 1]`; 0 past the end.
    IN and K count words."""
    read = ()  # type: tuple[Any, ...]
    for i in tl.static_range(COUNT):
        k = (step * COUNT + i) * K + tl.arange(0, K)[None, :]
        read = read + (tl.load(x_ptr + k, mask=live & (k < IN) if IN % (COUNT * K) else live, other=0),)  # noqa: RUF005
    return read


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


@triton.jit(do_not_specialize=["batch", "n", "blocks"], repr=named_by_place("lowbit_batch"))
def lowbit_batch_kernel(
    x_ptr, squares_ptr, tiles_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
    out_squares_ptr, partial_ptr, counter_ptr, batch, n, blocks, eps,
    IN: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr,
    UNIT: tl.constexpr, GATED: tl.constexpr, BLOCKS: tl.constexpr, S: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr,
    TOKENS: tl.constexpr, DOT_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    OPERANDS: tl.constexpr = 4 // HALVES
    K: tl.constexpr = 16 * OPERANDS * S
    STEPS: tl.constexpr = (GROUPS + COUNT - 1) // COUNT
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    program, split = tl.program_id(0), tl.program_id(1)
    block = tl.minimum(program * NEAR, blocks - NEAR)
    b = tl.arange(0, TOKENS)
    r = tl.arange(0, 16 * BLOCKS)
    i = tl.arange(0, S * BLOCKS * 256)
    far = r // 16 % NEAR + r // (16 * NEAR) * blocks
    tile_at = i // 256 % BLOCKS % NEAR + i // 256 % BLOCKS // NEAR * blocks
    tiles_ptr += block.to(tl.int64) * (WIDE * 256) + tile_at * (WIDE * 256) + i // (256 * BLOCKS) * 256 + i % 256
    row_at = (block + far) * (GROUPS * 16) + r % 16
    X_DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    SCALE_DTYPE: tl.constexpr = scales_ptr.dtype.element_ty
    PER_X: tl.constexpr = 32 // X_DTYPE.primitive_bitwidth
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
        next_x = next_x + (tl.zeros((TOKENS, K // PER_X), x_ptr.dtype.element_ty),)  # noqa: RUF005
    # Scales are too small to be copied as tiles are, in the background: each step reads those of the next.
    next_scales = _step_rows(scales_ptr, first, 16 // PER_SCALE, GROUPS, COUNT)
    next_zeros = next_scales
    if zeros_ptr is not None:
        next_zeros = _step_rows(zeros_ptr, first, 4, GROUPS, COUNT)
    for step in range(first, end):
        words = ()  # type: tuple[Any, ...]
        for g in tl.static_range(COUNT // HALVES):
            tile = (step * (COUNT // HALVES) + g) * S
            if WIDE // S % (COUNT // HALVES):
                tile = tl.minimum(tile, WIDE - S)
            words = words + (tl.load(tiles_ptr + tile * 256, eviction_policy="evict_first"),)  # noqa: RUF005
        if step == first:
            wait_for_previous(PDL)
            next_x = _step_tokens(x_ptr, live, step, IN // PER_X, K // PER_X, COUNT)
            if PARTS > 0:
                factor *= inverse_rms(load_squares(squares_ptr, b, PARTS), eps, IN, SCALE)
        following = tl.minimum(step + 1, STEPS - 1)
        xs = ()  # type: tuple[Any, ...]
        scales = ()  # type: tuple[Any, ...]
        zeros = ()  # type: tuple[Any, ...]
        for g in tl.static_range(COUNT):
            xs = xs + (tl.trans(from_words(next_x[g], X_DTYPE).to(DOT_DTYPE)),)  # noqa: RUF005
            scales = scales + (_own_number(next_scales[g], r, SCALE_DTYPE)[:, None],)  # noqa: RUF005
            if zeros_ptr is not None:
                zeros = zeros + (_own_number(next_zeros[g], r, tl.uint8)[:, None] - 8.0,)  # noqa: RUF005
        next_x = _step_tokens(x_ptr, live, following, IN // PER_X, K // PER_X, COUNT)
        next_scales = _step_rows(scales_ptr, following, 16 // PER_SCALE, GROUPS, COUNT)
        if zeros_ptr is not None:
            next_zeros = _step_rows(zeros_ptr, following, 4, GROUPS, COUNT)
        for g in tl.static_range(COUNT // HALVES):
            parts = _centered(words[g], DOT_DTYPE)
            for half in tl.static_range(HALVES):
                w = tl.join(parts[half * OPERANDS], parts[half * OPERANDS + 1])
                if HALVES == 1:
                    w = tl.join(w, tl.join(parts[2], parts[3]))
                # tile, block, g, lane t, half k, half row, pair, operand's two bits -> rows, in features
                w = tl.reshape(w, [S, BLOCKS, 8, 4, 2, 2, 2, 2, OPERANDS // 2])
                w = tl.reshape(tl.permute(w, (1, 5, 2, 0, 8, 7, 4, 3, 6)), [16 * BLOCKS, K])
                acc = tl.dot(w, xs[g * HALVES + half], input_precision="ieee")
                if zeros_ptr is not None:
                    sums = tl.dot(ones, xs[g * HALVES + half], input_precision="ieee")
                    acc -= zeros[g * HALVES + half] * sums
                total += acc * scales[g * HALVES + half]
    total *= factor[None, :]
    row = block * 16 + tl.arange(0, 16 * NEAR)
    fixed = load_fixed(row, n, bias_ptr, norm_ptr, GATED)  # while the splits meet
    residual = load_residual(residual_ptr, row, b, batch, n)
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
        squares = finish(sum, up, fixed, residual, row, own, b, batch, n, out_ptr, scaled_ptr, GATED, SCALE)
        if residual_ptr is not None:
            tl.store(out_squares_ptr + program * TOKENS + b, squares)
