"""Owns the kernel for a batch's products with INT4 weights, which `lowbit_linear` launches.

A weight is converted once for all tokens, so 8 is taken off each pair of codes.
"""

from runtime.ops._gemv import inverse_rms, let_next_start, load_squares, prefetch, wait_for_previous
from runtime.ops._lowbit import codes, finish, word_operands
from runtime.ops._triton import tl, triton

CENTERED = """{{
    .reg .b32 a, b, c, e; shr.b32 a, $4, 4; shr.b32 b, $4, 8; shr.b32 c, $4, 12; mov.b32 e, {eight};
    lop3.b32 $0, $4, 0x000f000f, {zero}, 0xea; sub.rn.{type} $0, $0, e;
    lop3.b32 $1, a, 0x000f000f, {zero}, 0xea; sub.rn.{type} $1, $1, e;
    lop3.b32 $2, b, 0x000f000f, {zero}, 0xea; sub.rn.{type} $2, $2, e;
    lop3.b32 $3, c, 0x000f000f, {zero}, 0xea; sub.rn.{type} $3, $3, e;
}}"""
BF16_CENTERED = tl.constexpr(CENTERED.format(zero="0x43004300", eight="0x43084308", type="bf16x2"))  # 128 + code, less 136
FP16_CENTERED = tl.constexpr(CENTERED.format(zero="0x64006400", eight="0x64086408", type="f16x2"))  # 1024 + code, less 1032


@triton.jit
def _centered(words, DOT_DTYPE: tl.constexpr):
    """The words' codes less 8 for each of four operands."""
    if tl.float32 == DOT_DTYPE:
        a, b, c, d = codes(words, DOT_DTYPE)
        parts = (a - 8.0, b / 16.0 - 8.0, c - 8.0, d / 16.0 - 8.0)
    elif tl.bfloat16 == DOT_DTYPE:
        parts = word_operands(words, BF16_CENTERED, DOT_DTYPE)
    else:
        parts = word_operands(words, FP16_CENTERED, DOT_DTYPE)
    return parts


@triton.jit(do_not_specialize=["batch", "n", "blocks"])
def lowbit_batch_kernel(
    x_ptr, squares_ptr, tiles_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
    out_squares_ptr, partial_ptr, counter_ptr, batch, n, blocks, eps,
    IN: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, HALVES: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr,
    GATED: tl.constexpr, BLOCKS: tl.constexpr, S: tl.constexpr, SPLITS: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
    TOKENS: tl.constexpr, DOT_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    OPERANDS: tl.constexpr = 4 // HALVES
    STEPS: tl.constexpr = WIDE // S
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    program, split = tl.program_id(0), tl.program_id(1)
    block = tl.minimum(program * NEAR, blocks - NEAR)
    tiles_ptr += block.to(tl.int64) * (WIDE * 256)
    scales_ptr += block * (GROUPS * 16)
    if zeros_ptr is not None:
        zeros_ptr += block * (GROUPS * 16)
    if AHEAD > 0:
        i = tl.arange(0, BLOCKS * AHEAD)
        near = i // AHEAD % NEAR + i // AHEAD // NEAR * blocks
        prefetch(tiles_ptr + near * (WIDE * 256) + tl.minimum(split * SHARE * S * 256 + i % AHEAD * 64, WIDE * 256 - 1), PDL)
    wait_for_previous(PDL)
    b = tl.arange(0, TOKENS)
    r = tl.arange(0, 16 * BLOCKS)
    i = tl.arange(0, S * BLOCKS * 256)
    far = r // 16 % NEAR + r // (16 * NEAR) * blocks
    tile_at = i // 256 % BLOCKS % NEAR + i // 256 % BLOCKS // NEAR * blocks
    tile_at = tile_at * (WIDE * 256) + i // (256 * BLOCKS) * 256 + i % 256
    scale_at = (far * (GROUPS * 16) + r % 16)[:, None] + tl.arange(0, HALVES)[None, :] * 16
    c = tl.arange(0, 16 * OPERANDS * S)
    total = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
    ones = tl.full((16 * BLOCKS, 16 * OPERANDS * S), 1.0, DOT_DTYPE)
    # Scales are too small to be copied as tiles are, in the background: each step reads those of the next.
    next_scales = tl.load(scales_ptr + scale_at + tl.minimum(split * SHARE, STEPS - 1) * (HALVES * 16))
    for step in tl.range(split * SHARE, tl.minimum(split * SHARE + SHARE, STEPS), num_stages=STAGES):
        scales = next_scales
        next_scales = tl.load(scales_ptr + scale_at + tl.minimum(step + 1, STEPS - 1) * (HALVES * 16))
        parts = _centered(tl.load(tiles_ptr + tile_at + step * (S * 256), eviction_policy="evict_first"), DOT_DTYPE)
        for half in tl.static_range(HALVES):
            k = step * (64 * S) + half * (16 * OPERANDS) + c
            mask = (b < batch)[None, :] & (k < IN)[:, None] if IN % (64 * S) else (b < batch)[None, :]
            x = tl.load(x_ptr + b[None, :] * IN + k[:, None], mask=mask, other=0.0).to(DOT_DTYPE)
            scale = tl.reshape(scales, [16 * BLOCKS]) if HALVES == 1 else tl.split(scales)[half]
            w = tl.join(parts[half * OPERANDS], parts[half * OPERANDS + 1])
            if HALVES == 1:
                w = tl.join(w, tl.join(parts[2], parts[3]))
            # tile, block, g, lane t, half k, half row, pair, operand's two bits -> rows, in features
            w = tl.reshape(w, [S, BLOCKS, 8, 4, 2, 2, 2, 2, OPERANDS // 2])
            w = tl.reshape(tl.permute(w, (1, 5, 2, 0, 8, 7, 4, 3, 6)), [16 * BLOCKS, 16 * OPERANDS * S])
            acc = tl.dot(w, x, input_precision="ieee")
            if zeros_ptr is not None:
                sums = tl.dot(ones, x, input_precision="ieee")
                zeros = tl.load(zeros_ptr + far * (GROUPS * 16) + r % 16 + (step * HALVES + half) * 16)
                acc -= (zeros.to(tl.float32) - 8.0)[:, None] * sums
            total += acc * scale.to(tl.float32)[:, None]

    if PARTS > 0:
        total *= inverse_rms(load_squares(squares_ptr, b, PARTS), eps, IN, SCALE)[None, :]
    last = True
    if SPLITS > 1:
        # The last split of a block of rows to arrive sums all of them in split order: the bits do not depend on which it is.
        cell = r[:, None] * TOKENS + b[None, :]
        partial_ptr += program * (SPLITS * 16 * BLOCKS * TOKENS)
        tl.store(partial_ptr + split * (16 * BLOCKS * TOKENS) + cell, total)
        tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
        last = tl.atomic_add(counter_ptr + program, 1, sem="acq_rel") == SPLITS - 1
        if last:
            total = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
            for part in tl.static_range(SPLITS):
                total += tl.load(partial_ptr + part * (16 * BLOCKS * TOKENS) + cell, cache_modifier=".cg")
            tl.store(counter_ptr + program, 0)
    if last:
        if GATED:
            sum, up = tl.split(tl.permute(tl.reshape(total, [2, 16 * NEAR, TOKENS]), (1, 2, 0)))
        else:
            sum, up = total, total
        row = block * 16 + tl.arange(0, 16 * NEAR)
        squares = finish(
            *(sum, up, row, row >= program * (NEAR * 16), b, batch, n),
            *(bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr, GATED, SCALE),
        )
        if residual_ptr is not None:
            tl.store(out_squares_ptr + program * TOKENS + b, squares)
