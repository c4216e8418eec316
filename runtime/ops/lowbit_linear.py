"""Owns the products with weights of 8 and 4 bits: the three projections of a layer, and the LM head where it is asked for.

Does not own how the weights lie in memory (lowbit) or what the dense kernels share (_gemv).

A conversion for each weight and a multiplication for each weight are more than a GPU can issue while memory delivers them. So
the tensor cores multiply, for one token too: a lane's 16 bytes of weights become its operands by a few logical operations on
pairs of weights, and the token is the other operand. FP8 operands are 2^-120 of the weights, so x is taken times 2^90 and the
sum times 2^30; INT4 operands are 128 + code, and what is too much is taken off by a second product, of a constant.
"""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    TOKENS,
    Scaled,
    dot_dtype,
    inverse_rms,
    launch_options,
    let_next_start,
    load_squares,
    prefetch,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.lowbit import TILE_WIDTH, LowBit, fp8_values, int4_values

COLUMNS = 8
"""Token columns of the smallest tensor core product: one token fills them all."""

FEW_PROGRAMS = 192
"""Programs below which a projection of a batch splits its in features: an H200 has 132 SMs."""


@triton.jit
def _fp8_operands(words):
    """fp8_values of two words at a time, as pairs of bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b;
        and.b32 $0, $2, 0x87f087f0;
        shl.b32 a, $2, 4;
        shr.b32 b, $2, 4;
        and.b32 b, b, 0x07000700;
        lop3.b32 $1, a, 0x80f080f0, b, 0xea;
        }""",
        "=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _int4_operands(words):
    """int4_values of two words at a time, as pairs of bfloat16."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 a, b, c;
        shr.b32 a, $4, 4;
        shr.b32 b, $4, 8;
        shr.b32 c, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $1, a, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $2, b, 0x000f000f, 0x43004300, 0xea;
        lop3.b32 $3, c, 0x000f000f, 0x43004300, 0xea;
        }""",
        "=r,=r,=r,=r,r",
        [words],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _operands(words, FP8: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """What the words hold for each operand, in DOT_DTYPE; FP8 times 2^-120 if that is bfloat16."""
    if tl.bfloat16 == DOT_DTYPE:
        parts = _fp8_operands(words) if FP8 else _int4_operands(words)
    elif FP8:
        a, b = fp8_values(words)
        parts = ((a * 1.329227995784916e36).to(DOT_DTYPE), (b * 1.329227995784916e36).to(DOT_DTYPE))
    else:
        a, b, c, d = int4_values(words)
        parts = (a.to(DOT_DTYPE), b.to(DOT_DTYPE), c.to(DOT_DTYPE), d.to(DOT_DTYPE))
    return parts


@triton.jit
def _settle(x, DOT_DTYPE: tl.constexpr):
    """x, made here and nowhere else: Triton would move a change of layout before its making and make it eight times over."""
    if tl.bfloat16 == DOT_DTYPE:
        x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.bfloat16, is_pure=False, pack=2)
    return x


@triton.jit
def _operand(part, G: tl.constexpr, S: tl.constexpr, BLOCKS: tl.constexpr, KS: tl.constexpr):
    """One operand's values in the order of `_load_tiles` -> `[G * KS, 16 * BLOCKS, 16 * S]`; no value leaves its lane."""
    part = tl.reshape(part, [G, S, BLOCKS, KS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(part, (0, 3, 2, 7, 4, 1, 6, 5, 8)), [G * KS, 16 * BLOCKS, 16 * S])


@triton.jit
def _load_tiles(
    tiles_ptr,
    step,
    far,
    G: tl.constexpr,
    S: tl.constexpr,
    BLOCKS: tl.constexpr,
    NEAR: tl.constexpr,
    KS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The words of one step: BLOCKS blocks of rows, NEAR of them next to each other and the next NEAR `far` blocks on; KS
    warps; for each G groups of S tiles. Past the end of a row its last tile is read again, and x is zero there."""
    i = tl.arange(0, G * S * BLOCKS * KS * 256)
    warp = i // 256 % KS
    block = i // (256 * KS) % BLOCKS
    tile = (step * (G * KS) + i // (256 * KS * BLOCKS * S) * KS + warp) * S + i // (256 * KS * BLOCKS) % S
    if WIDE % (G * KS * S):
        tile = tl.minimum(tile, WIDE - 1)
    at = (block % NEAR + block // NEAR * far) * (WIDE * 256) + tile * 256 + i % 256
    return tl.load(tiles_ptr + at, eviction_policy="evict_first")


@triton.jit
def _load_scales(scales_ptr, group, far, BLOCKS: tl.constexpr, NEAR: tl.constexpr, GROUPS: tl.constexpr):
    """Scales or zeros `[groups, 16 * BLOCKS]` of some groups."""
    r = tl.arange(0, 16 * BLOCKS)
    block = r // 16 % NEAR + r // (16 * NEAR) * far
    return tl.load(scales_ptr + tl.minimum(group, GROUPS - 1)[:, None] * 16 + (block * (GROUPS * 16) + r % 16)[None, :])


@triton.jit
def _in_features(step, j, G: tl.constexpr, S: tl.constexpr, KS: tl.constexpr, OPERANDS: tl.constexpr):
    """The in features that operand j of one step is made of, `[G * KS, 16 * S]`."""
    c = tl.arange(0, 16 * S)
    tile = (step * (G * KS) + tl.arange(0, G * KS)[:, None]) * S + (c // 16)[None, :]
    return tile * (16 * OPERANDS) + 16 * j + (c % 16)[None, :]


@triton.jit
def _finish(
    sum, r, n, bias_ptr, residual_ptr, out_ptr, at, mask, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, AXES: tl.constexpr
):
    """sum + bias + residual, in out's type, stored; `r` the rows, `at` where they go."""
    if HAS_BIAS:
        bias = tl.load(bias_ptr + r, mask=r < n, other=0.0).to(tl.float32)
        sum += tl.expand_dims(bias, 1) if AXES == 2 else bias
    if RESIDUAL:
        sum += tl.load(residual_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x = sum.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, x, mask=mask)
    return x


@triton.jit
def _silu_mul(gate, up, r, n, bias_ptr, HAS_BIAS: tl.constexpr, AXES: tl.constexpr):
    """silu(gate + its bias) * (up + its bias)."""
    if HAS_BIAS:
        gate_bias = tl.load(bias_ptr + r, mask=r < n, other=0.0).to(tl.float32)
        up_bias = tl.load(bias_ptr + n + r, mask=r < n, other=0.0).to(tl.float32)
        gate += tl.expand_dims(gate_bias, 1) if AXES == 2 else gate_bias
        up += tl.expand_dims(up_bias, 1) if AXES == 2 else up_bias
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["n"])
def _lowbit_kernel(
    x_ptr,
    norm_ptr,
    tiles_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    n,
    eps,
    IN: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    KS: tl.constexpr,
    G: tl.constexpr,
    S: tl.constexpr,
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    OPERANDS: tl.constexpr = 2 if FP8 else 4
    HALVES: tl.constexpr = 16 * OPERANDS // GROUP if GROUP > 0 and GROUP < 16 * OPERANDS else 1
    STEPS: tl.constexpr = (WIDE + G * KS * S - 1) // (G * KS * S)
    EVEN: tl.constexpr = IN == STEPS * G * KS * S * 16 * OPERANDS
    SHRUNK: tl.constexpr = FP8 and tl.bfloat16 == DOT_DTYPE
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    far = tl.num_programs(0) * NEAR
    block = tl.program_id(0) * NEAR
    tiles_ptr += block.to(tl.int64) * (WIDE * 256)
    scales_ptr += block * (GROUPS * 16)
    zeros_ptr += block * (GROUPS * 16)

    words = (_load_tiles(tiles_ptr, 0, far, G, S, BLOCKS, NEAR, KS, WIDE),)
    for i in tl.static_range(1, AHEAD):
        words = words + (_load_tiles(tiles_ptr, i, far, G, S, BLOCKS, NEAR, KS, WIDE),)  # type: ignore[assignment]  # noqa: RUF005
    total = tl.zeros((G * KS, 16 * BLOCKS, COLUMNS), tl.float32)
    squares = tl.zeros((G * KS, 16 * S), tl.float32)
    constant = tl.full((G * KS, 16 * BLOCKS, 16 * S), 1.0 if HAS_ZEROS else -136.0, DOT_DTYPE)
    wait_for_previous(PDL)
    for step in tl.static_range(STEPS):
        parts = _operands(words[0], FP8, DOT_DTYPE)
        words = words[1:]  # type: ignore[assignment]
        if step + AHEAD < STEPS:
            more = _load_tiles(tiles_ptr, step + AHEAD, far, G, S, BLOCKS, NEAR, KS, WIDE)
            words = words + (more,)  # type: ignore[assignment]  # noqa: RUF005
        for half in tl.static_range(HALVES):
            sums = tl.zeros((G * KS, 16 * BLOCKS, COLUMNS), tl.float32)
            acc = total if GROUP == 0 else sums
            for j in tl.static_range(half * OPERANDS // HALVES, (half + 1) * OPERANDS // HALVES):
                k = _in_features(step, j, G, S, KS, OPERANDS)
                inside = None if EVEN else k < IN
                x = tl.load(x_ptr + k, mask=inside).to(tl.float32)
                if not EVEN:
                    x = tl.where(inside, x, 0.0)
                if NORM:
                    squares += x * x
                    x *= tl.load(norm_ptr + k, mask=inside).to(tl.float32)
                if not EVEN:
                    x = tl.where(inside, x, 0.0)
                if SHRUNK:
                    x *= 1.2379400392853803e27
                x = _settle(x.to(DOT_DTYPE), DOT_DTYPE)
                x = tl.broadcast_to(x[:, :, None], [G * KS, 16 * S, COLUMNS])
                if HAS_ZEROS:
                    sums = tl.dot(constant, x, sums, input_precision="ieee")
                elif not FP8:
                    acc = tl.dot(constant, x, acc, input_precision="ieee")
                acc = tl.dot(_operand(parts[j], G, S, BLOCKS, KS), x, acc, input_precision="ieee")
            if GROUP == 0:
                total = acc
            else:
                group = (step * (G * KS) + tl.arange(0, G * KS)) * HALVES + half
                if HAS_ZEROS:
                    zeros = _load_scales(zeros_ptr, group, far, BLOCKS, NEAR, GROUPS)
                    acc -= (128.0 + zeros.to(tl.float32))[:, :, None] * sums
                scales = _load_scales(scales_ptr, group, far, BLOCKS, NEAR, GROUPS)
                total += acc * scales.to(tl.float32)[:, :, None]

    sum = tl.max(tl.sum(total, 0), 1)  # the columns are equal
    if GROUP == 0:
        r = tl.arange(0, 16 * BLOCKS)
        sum *= tl.load(scales_ptr + (r // 16 % NEAR + r // (16 * NEAR) * far) * 16 + r % 16)
    if SHRUNK:
        sum *= 1073741824.0
    if NORM:
        sum *= tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / IN + eps)
    r = block * 16 + tl.arange(0, 16 * NEAR)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(sum, [2, 16 * NEAR])))
        tl.store(out_ptr + r, _silu_mul(gate, up, r, n, bias_ptr, HAS_BIAS, 1).to(out_ptr.dtype.element_ty), mask=r < n)
    else:
        _finish(sum, r, n, bias_ptr, residual_ptr, out_ptr, r, r < n, HAS_BIAS, RESIDUAL, 1)


@triton.jit(do_not_specialize=["batch", "n", "blocks"])
def _lowbit_batch_kernel(
    x_ptr,
    squares_ptr,
    tiles_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    out_squares_ptr,
    partial_ptr,
    counter_ptr,
    batch,
    n,
    blocks,
    eps,
    IN: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    FP8: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCKS: tl.constexpr,
    S: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    OPERANDS: tl.constexpr = 2 if FP8 else 4
    HALVES: tl.constexpr = 16 * OPERANDS // GROUP if GROUP > 0 and GROUP < 16 * OPERANDS else 1
    STEPS: tl.constexpr = (WIDE + S - 1) // S
    EVEN: tl.constexpr = IN == STEPS * S * 16 * OPERANDS
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    SHRUNK: tl.constexpr = FP8 and tl.bfloat16 == DOT_DTYPE
    NEAR: tl.constexpr = BLOCKS // 2 if GATED else BLOCKS
    program, split = tl.program_id(0), tl.program_id(1)
    # Blocks of rows that the last two programs share get the same bits twice.
    block = tl.minimum(program * NEAR, tl.maximum(blocks - NEAR, 0))
    tiles_ptr += block.to(tl.int64) * (WIDE * 256)
    scales_ptr += block * (GROUPS * 16)
    zeros_ptr += block * (GROUPS * 16)
    if AHEAD > 0:
        i = tl.arange(0, BLOCKS * AHEAD)
        near = i // AHEAD % NEAR + i // AHEAD // NEAR * blocks
        prefetch(tiles_ptr + near * (WIDE * 256) + tl.minimum(split * SHARE * S * 256 + i % AHEAD * 64, WIDE * 256 - 1), PDL)
    wait_for_previous(PDL)
    b = tl.arange(0, TOKENS)
    live = b < batch
    total = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
    constant = tl.full((16 * BLOCKS, 16 * S), 1.0 if HAS_ZEROS else -136.0, DOT_DTYPE)
    c = tl.arange(0, 16 * S)
    for step in tl.range(split * SHARE, tl.minimum(split * SHARE + SHARE, STEPS), num_stages=STAGES):
        words = _load_tiles(tiles_ptr, step, blocks, 1, S, BLOCKS, NEAR, 1, WIDE)
        parts = _operands(words, FP8, DOT_DTYPE)
        for half in tl.static_range(HALVES):
            sums = tl.zeros((16 * BLOCKS, TOKENS), tl.float32)
            acc = total if GROUP == 0 else sums
            for j in tl.static_range(half * OPERANDS // HALVES, (half + 1) * OPERANDS // HALVES):
                k = (step * S + c // 16) * (16 * OPERANDS) + 16 * j + c % 16
                mask = live[None, :] if EVEN else live[None, :] & (k < IN)[:, None]
                x = tl.load(x_ptr + b[None, :] * IN + k[:, None], mask=mask, other=0.0)
                if SHRUNK:
                    x = x.to(tl.float32) * 1.2379400392853803e27
                x = x.to(DOT_DTYPE)
                if HAS_ZEROS:
                    sums = tl.dot(constant, x, sums, input_precision="ieee")
                elif not FP8:
                    acc = tl.dot(constant, x, acc, input_precision="ieee")
                w = tl.reshape(_operand(parts[j], 1, S, BLOCKS, 1), [16 * BLOCKS, 16 * S])
                acc = tl.dot(w, x, acc, input_precision="ieee")
            if GROUP == 0:
                total = acc
            else:
                group = tl.zeros((1,), tl.int32) + step * HALVES + half
                if HAS_ZEROS:
                    zeros = tl.reshape(_load_scales(zeros_ptr, group, blocks, BLOCKS, NEAR, GROUPS), [16 * BLOCKS])
                    acc -= (128.0 + zeros.to(tl.float32))[:, None] * sums
                scales = tl.reshape(_load_scales(scales_ptr, group, blocks, BLOCKS, NEAR, GROUPS), [16 * BLOCKS])
                total += acc * scales.to(tl.float32)[:, None]

    r = tl.arange(0, 16 * BLOCKS)
    if GROUP == 0:
        total *= tl.load(scales_ptr + (r // 16 % NEAR + r // (16 * NEAR) * blocks) * 16 + r % 16)[:, None]
    if SHRUNK:
        total *= 1073741824.0
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
        row = block * 16 + tl.arange(0, 16 * NEAR)
        at = b[None, :].to(tl.int64) * n + row[:, None]
        mask = live[None, :] & (row < n)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, 16 * NEAR, TOKENS]), (1, 2, 0)))
            tl.store(out_ptr + at, _silu_mul(gate, up, row, n, bias_ptr, HAS_BIAS, 2).to(out_ptr.dtype.element_ty), mask=mask)
        else:
            x = _finish(total, row, n, bias_ptr, residual_ptr, out_ptr, at, mask, HAS_BIAS, RESIDUAL, 2)
        if RESIDUAL:
            # The next norm begins here, as in proj_residual.
            x = x.to(tl.float32)
            g = tl.load(norm_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
            tl.store(scaled_ptr + at, (x * g * SCALE).to(out_ptr.dtype.element_ty), mask=mask)
            own = ((row >= program * (16 * NEAR)) & (row < n))[:, None]
            tl.store(out_squares_ptr + program * TOKENS + b, tl.sum(tl.where(own, x * x, 0.0), 0))


@dataclass(frozen=True)
class LowBitTile:
    """How a product is cut. One token: each of a block's `warps` walks in features of its own, `groups` scale groups at a time,
    and asks for the first `ahead` such steps before the wait. A batch: its blocks pipeline their loads in `stages`.

    Attributes:
        blocks: of 16 rows, that one program takes (for gate and up, of both together).
        tiles: that one step takes, of a scale group.
        splits: programs that share a row's in features; batches, with a residual.
        ahead: steps; batches: lines of 128 bytes of each block of rows, fetched to L2 before the wait.
    """

    blocks: int
    warps: int
    tiles: int
    groups: int = 1
    ahead: int = 1
    stages: int = 1
    splits: int = 1


def lowbit_tile(weight: LowBit, batch: int, gated: bool = False, residual: bool = False) -> LowBitTile:
    """The rule for every shape. One token: 8 warps, as much of a row at a time as registers hold. A batch: 64 rows, so that
    wgmma takes them, and splits where that makes too few programs."""
    blocks, wide = weight.tiles.shape[:2]
    tiles = max(1, weight.group // TILE_WIDTH[weight.format]) if weight.group else 4
    if batch > 1:
        per_program = 4
        while per_program > (2 if gated else 1) and blocks < per_program:
            per_program //= 2
        splits = 1
        while residual and splits < 4 and blocks // per_program * splits < FEW_PROGRAMS and wide // tiles >= 4 * splits:
            splits *= 2
        return LowBitTile(per_program, 4, tiles, ahead=4, stages=4, splits=splits)
    made = _single_tile(weight, gated)
    while made.warps > 1 and wide < made.warps * made.tiles:
        made = replace(made, warps=made.warps // 2)
    return made


def _single_tile(weight: LowBit, gated: bool) -> LowBitTile:
    """What was fastest for rows of 4096 and of 11008 in features, H200, 2026-11-29, among 93 ways to cut the four projections
    of a 7B model: few warps with long stretches of a row each."""
    tile, wide = TILE_WIDTH[weight.format], weight.tiles.shape[1]
    long = weight.shape[1] > 8192
    if not weight.group:
        tiles = 4 if gated or long else 16
        while tiles > 1 and wide % tiles:
            tiles //= 2
        return (
            LowBitTile(2, 4, tiles, ahead=2) if gated else LowBitTile(1, 8, tiles, ahead=3) if long else LowBitTile(1, 4, tiles)
        )
    per_group = max(1, weight.group // tile)
    groups = 1 if gated else 2 if long else 4
    while groups > 1 and wide < 4 * groups * per_group:
        groups //= 2
    return LowBitTile(2, 8, per_group, 1, ahead=2) if gated else LowBitTile(1, 4, per_group, groups, ahead=2)


def lowbit_linear(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    tile: LowBitTile,
    pdl: bool,
    interpreted: bool = False,
    norm: Tensor | None = None,
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
    """x `[B, in]` -> out `[B, N]` = linear(x), summed in float32, rounded once to out's type. With `norm [C]`, of RMSNorm(x) *
    norm, for a batch as begun in `scaled`; with `residual [B, N]`, added to it, and for a batch `next_norm [C]` begun in
    `next_scaled`; `gated`: silu of the first half of the rows times the second, `[B, N / 2]`. partial, counter, full_edge: as
    in proj_residual and norm_linear.

    Bytes: the tiles and scales, once; x and out stay in L2. Torch twin: the op's, with `dense`.
    """
    weight, batch = linear.weight, len(x)
    assert isinstance(weight, LowBit)
    all_blocks, wide = weight.tiles.shape[:2]
    blocks, n = (all_blocks // 2, weight.shape[0] // 2) if gated else (all_blocks, weight.shape[0])
    programs = triton.cdiv(blocks, tile.blocks // 2 if gated else tile.blocks)
    tensors = (
        *(weight.tiles, weight.scales, weight.zeros if weight.zeros is not None else weight.scales),
        *(linear.bias if linear.bias is not None else x, residual if residual is not None else x, out),
    )
    shape: dict[str, Any] = {
        "IN": weight.shape[1],
        "WIDE": wide,
        "GROUPS": weight.scales.shape[1],
        "FP8": weight.format == "fp8",
        "GROUP": weight.group,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_BIAS": linear.bias is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "BLOCKS": tile.blocks,
        "S": tile.tiles,
        "AHEAD": tile.ahead,
        "DOT_DTYPE": dot_dtype(x.dtype, interpreted),
        "PDL": pdl,
    } | launch_options(tile.warps, tile.stages, pdl and not full_edge)
    if batch == 1:
        shape |= {"NORM": norm is not None, "KS": tile.warps, "G": tile.groups, "COLUMNS": COLUMNS}
        _lowbit_kernel[(programs,)](x, norm if norm is not None else x, *tensors, n, eps, **shape)
        return out
    begun = scaled if scaled is not None else next_scaled
    shape |= {"PARTS": len(scaled.squares) if scaled is not None else 0, "SCALE": begun.scale if begun is not None else 1.0}
    shape |= {"SPLITS": tile.splits, "STAGES": tile.stages, "TOKENS": TOKENS}
    into = (x, x, x) if next_scaled is None else (next_norm, next_scaled.x, next_scaled.squares)
    read = (x, x) if scaled is None else (scaled.x, scaled.squares)
    scratch = (x if partial is None else partial, x if counter is None else counter)
    _lowbit_batch_kernel[(programs, tile.splits)](*read, *tensors, *into, *scratch, batch, n, blocks, eps, **shape)
    return out
