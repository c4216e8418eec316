"""Owns the products of one token, through the tensor cores: QKV, output, gate and up, down and the LM head are one kernel here,
for dense weights of two bytes, FP8 and INT4. Does not own dense ones in float32 or of other widths (norm_linear, proj_residual,
norm_gate_up).

A warp reads 512 bytes of a row at a time, 16 a lane, and the same places of x. To the tensor cores (PTX ISA, mma.m16n8k16)
they are eight rows of weights and eight columns of x: lane 4c + t holds piece c of both, so that entry (c, c) of the product is
piece c's part of the sum, and the other entries mean nothing. A second row of weights makes rows 8 to 15. So weights and x are
used where a load puts them, and a pair of rows takes four registers to sum in, whatever a slice holds: a thread's registers are
for weights on their way. Dense ones are multiplied as they are; FP8's become numbers by their bits, seven operations for four
of them (`pairs`), and the two of a word meet places of x that are half a row apart. INT4's take five for eight (`codes`); what
they are too large by, 8 or a group's zero, is taken off as a product of a constant, once for all rows of a warp.
"""

from typing import Any  # noqa: F401 (comments tell types)

import torch
from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    RAISED,
    Scaled,
    ask_before,
    dot_dtype,
    inverse_rms,
    launch_options,
    let_next_start,
    load_rows,
    load_squares,
    named_by_place,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile, multiplies, piece
from runtime.ops.fp8 import UNITS, Fp8, pairs
from runtime.ops.lowbit import SMALLEST, LowBit, codes

COLUMNS = tl.constexpr(8)
"""Columns of the smallest tensor core product, and pieces of 32 in features that a warp takes of a row at a time."""


FMA = tl.constexpr("fma.rn.f32 $0, $1, $2, $3;")


@triton.jit
def _ask(weight_ptr, k, step, far, PAIRS: tl.constexpr, SLICE: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr):
    """One step's slices of each of a warp's pairs of rows, `far` words apart; 0 past the end of a row. TILE: rows that take
    turns in memory."""
    w = ()
    for p in tl.static_range(PAIRS):
        at = weight_ptr + far * p + step * (SLICE * TILE)
        if (step + 1) * SLICE > STRIDE:
            w = w + (tl.load(at, mask=k < STRIDE - step * SLICE, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            w = w + (tl.load(at, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
    return w


@triton.jit
def _ask_groups(scales_ptr, group, step, far, PAIRS: tl.constexpr, SLICE: tl.constexpr, GROUPS: tl.constexpr):
    """The scales of a step's groups for each pair of rows; past the end of a row the last again."""
    found = ()
    for p in tl.static_range(PAIRS):
        at = group + step * SLICE
        if (step + 1) * SLICE > GROUPS // 2:
            at = tl.minimum(at, GROUPS - 1)
        found = found + (tl.load(scales_ptr + far * p + at),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _rows(words, BATCH: tl.constexpr):
    """What lanes hold, warp after warp, as rows `[BATCH, 16, 32]` of two products of 16 words."""
    # half of the rows, warp, piece, lane of four, product, half, pair -> warp, row, product, half, lane, pair
    parts = tl.reshape(words, [2, BATCH, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (1, 0, 2, 4, 5, 3, 6)), [BATCH, 16, 32])


@triton.jit
def _columns(
    x_ptr, k, step, BATCH: tl.constexpr, SLICE: tl.constexpr, STRIDE: tl.constexpr, RAISE: tl.constexpr, DOT_DTYPE: tl.constexpr
):  # fmt: skip
    """One step's places of x, 0 past STRIDE, as columns `[BATCH, 32, 8]`, in the order of `_rows`."""
    if (step + 1) * SLICE > STRIDE:
        x = tl.load(x_ptr + step * SLICE, mask=k < STRIDE - step * SLICE, other=0.0)
    else:
        x = tl.load(x_ptr + step * SLICE)
    x = x.to(DOT_DTYPE)
    if RAISE != 1.0:
        x *= RAISE
    parts = tl.reshape(x, [BATCH, COLUMNS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 3, 4, 2, 5, 1)), [BATCH, 32, COLUMNS])


@triton.jit
def _ask_int4(ptr, group, step, far, PAIRS: tl.constexpr, HALVES: tl.constexpr, SLICE: tl.constexpr, GROUPS: tl.constexpr):
    """What HALVES groups of each tile of a step have of their own, for each pair of rows; past the end of a row the last."""
    found = ()
    for p in tl.static_range(PAIRS):
        for half in tl.static_range(HALVES):
            at = group + (step * SLICE + half)
            if (step + 1) * SLICE > GROUPS:
                at = tl.minimum(at, GROUPS - 1)
            found = found + (tl.load(ptr + far * p + at * 16),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def _int4_rows(words, BATCH: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """What lanes hold of a tile, warp after warp, as rows `[BATCH, 16, 16]` of eight products; of every other one 16 times."""
    # half of the rows, warp, piece, lane of four, operand's middle bit, half, pair -> warp, row, half, lane, pair
    parts = tl.permute(tl.reshape(words, [2, BATCH, 8, 4, 2, 2, 2]), (1, 0, 2, 5, 3, 6, 4))
    low, high = tl.split(tl.reshape(parts, [BATCH, 16, 16, 2]))  # nothing is joined: Triton 3.6 would lay that out otherwise
    a, b, c, d = codes(low, DOT_DTYPE)
    other_a, other_b, other_c, other_d = codes(high, DOT_DTYPE)
    return a, b, other_a, other_b, c, d, other_c, other_d


@triton.jit
def _int4_columns(
    x_ptr, feature, step, BATCH: tl.constexpr, SLICE: tl.constexpr, IN: tl.constexpr, RAISE: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """One step's places of x, 0 past IN, as columns `[BATCH, 16, 8]` of eight products."""
    columns = ()
    for both in tl.static_range(4):
        at = step * (SLICE * 4) + both * 32
        if (step + 1) * SLICE * 4 > IN:
            x = tl.load(x_ptr + at, mask=feature < IN - at, other=0.0).to(DOT_DTYPE)
        else:
            x = tl.load(x_ptr + at).to(DOT_DTYPE)
        if RAISE != 1.0:
            x *= RAISE
        # warp, piece, lane of four, product, half, pair -> warp, half, lane, pair, piece
        parts = tl.permute(tl.reshape(x, [BATCH, COLUMNS, 4, 2, 2, 2]), (0, 4, 2, 5, 1, 3))
        first, second = tl.split(tl.reshape(parts, [BATCH, 16, COLUMNS, 2]))
        columns = columns + (first, second)  # type: ignore[assignment]  # noqa: RUF005
    return columns


@triton.jit
def _int4_offsets(columns, nothing, HAS_ZEROS: tl.constexpr, HALVES: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """For each group of a tile, what `codes` makes of -8 times x, or of 1. By its bits: compilers lose numbers so small."""
    BATCH: tl.constexpr = nothing.shape[0]
    if tl.float32 == DOT_DTYPE:
        constant = tl.full((BATCH, 16, 16), 1.0 if HAS_ZEROS else -8.0, DOT_DTYPE)
    else:
        constant = tl.full((BATCH, 16, 16), 1 if HAS_ZEROS else -0x7FF8, tl.int16).to(DOT_DTYPE, bitcast=True)
    offsets = ()
    for half in tl.static_range(HALVES):
        offset = nothing
        for o in tl.static_range(8 // HALVES):
            offset = tl.dot(constant, columns[half * (8 // HALVES) + o], offset, input_precision="ieee")
        offsets = offsets + (offset,)  # type: ignore[assignment]  # noqa: RUF005
    return offsets


@triton.jit
def _int4_sum(
    sum, rows, columns, offsets, scales, zeros, nothing, HAS_ZEROS: tl.constexpr, HALVES: tl.constexpr, DOT_DTYPE: tl.constexpr
):  # fmt: skip
    """sum and what a pair of rows gives with a step's x."""
    for half in tl.static_range(HALVES):
        part, large = nothing, nothing
        for o in tl.static_range(4 // HALVES):
            even, odd = rows[half * (8 // HALVES) + 2 * o], rows[half * (8 // HALVES) + 2 * o + 1]
            part = tl.dot(even, columns[half * (8 // HALVES) + 2 * o], part, input_precision="ieee")
            large = tl.dot(odd, columns[half * (8 // HALVES) + 2 * o + 1], large, input_precision="ieee")
        part += large * 0.0625
        if HAS_ZEROS:
            part -= zeros[half].to(tl.float32)[:, :, None] * offsets[half]
        else:
            part += offsets[half]
        scale = tl.broadcast_to(scales[half].to(tl.float32)[:, :, None], part.shape)
        if tl.float32 == DOT_DTYPE:
            sum += part * scale
        else:  # here and now: LLVM would put all of them off to the end, and keep what they take till then
            sum = tl.inline_asm_elementwise(FMA, "=r,r,r,r", [part, scale, sum], dtype=tl.float32, is_pure=False, pack=1)
    return sum


@triton.jit
def _stacked(parts, COUNT: tl.constexpr):
    """COUNT tensors `[A, B]`, a power of two up to 16, as one `[A, B, COUNT]`."""
    for level in tl.static_range(4):
        if COUNT >> level > 1:
            joined = ()
            for each in tl.static_range(COUNT >> (level + 1)):
                both = tl.join(parts[each], parts[each + (COUNT >> (level + 1))])
                joined = joined + (both,)  # type: ignore[assignment]  # noqa: RUF005
            parts = joined
    return tl.reshape(parts[0], [parts[0].shape[0], parts[0].shape[1], COUNT])


@triton.jit(do_not_specialize=["n"], repr=named_by_place("token"))
def _token_kernel(
    x_ptr, squares_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr,
    out_squares_ptr, n, eps,
    IN: tl.constexpr, STRIDE: tl.constexpr, TILE: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, RAISE: tl.constexpr,
    UNIT: tl.constexpr, SCALE: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr, ROW_WARPS: tl.constexpr,
    K_WARPS: tl.constexpr, AHEAD: tl.constexpr, DOT_DTYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    WARPS: tl.constexpr = ROW_WARPS * K_WARPS
    INT4: tl.constexpr = TILE > 1
    FP8: tl.constexpr = scales_ptr is not None and not INT4
    SLICE: tl.constexpr = K_WARPS * 256  # words: a number, or two of FP8, or four of INT4
    STEPS: tl.constexpr = (STRIDE + SLICE - 1) // SLICE
    PAIR: tl.constexpr = 1 if GATED else 2  # rows of the output that a pair of rows makes
    ROWS: tl.constexpr = ROW_WARPS * PAIRS * PAIR
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two programs share get the same bits twice
    second = n if GATED else 1  # from a pair's first row to its second: a row of gate and of up, or neighbours
    i = tl.arange(0, 2 * WARPS * 256)
    own_row, k = i // SLICE % ROW_WARPS * (PAIRS * PAIR), i % SLICE
    if INT4:  # a warp's rows are of one tile
        near = own_row // TILE * (TILE * STRIDE) + own_row % TILE * 32 + (i // 32 % (SLICE // 32) * (TILE * 32) + i % 32)
        near = (row // TILE).to(tl.int64) * (TILE * STRIDE) + row % TILE * 32 + near
        weight_ptr += near + i // (WARPS * 256) * (n * STRIDE if GATED else 32)
    else:
        weight_ptr += row.to(tl.int64) * STRIDE + ((own_row + i // (WARPS * 256) * second) * STRIDE + k)
    FAR: tl.constexpr = PAIR * (32 if INT4 else STRIDE)  # words from a pair of rows to the next
    w = ()  # type: tuple[Any, ...]
    for step in tl.static_range(AHEAD):
        if step < STEPS:
            w = w + _ask(weight_ptr, i % SLICE, step, FAR, PAIRS, SLICE, STRIDE, TILE)
    GROUPS: tl.constexpr = 4 * STRIDE // GROUP if INT4 else IN // GROUP if GROUP else 1
    HALVES: tl.constexpr = 128 // GROUP if INT4 else 1
    own_scales, own_zeros = (), ()  # type: tuple[Any, ...], tuple[Any, ...]
    if INT4:
        warp, m = tl.arange(0, WARPS)[:, None], tl.arange(0, 16)[None, :]
        first_row = row + warp // K_WARPS * (PAIRS * PAIR)
        group = (warp % K_WARPS * 8 + m % 8) * HALVES
        scale_at = first_row // 16 * (GROUPS * 16) + first_row % 16 + m // 8 * (n * GROUPS if GATED else 1)
        scales_ptr += scale_at
        if zeros_ptr is not None:
            zeros_ptr += scale_at
        for step in tl.static_range(AHEAD):
            if step < STEPS:
                own_scales += _ask_int4(scales_ptr, group, step, PAIR, PAIRS, HALVES, SLICE // 32 * HALVES, GROUPS)
                if zeros_ptr is not None:
                    own_zeros += _ask_int4(zeros_ptr, group, step, PAIR, PAIRS, HALVES, SLICE // 32 * HALVES, GROUPS)
    low_scales, high_scales = (), ()  # type: tuple[Any, ...], tuple[Any, ...]
    if FP8 and GROUP:
        warp, m = tl.arange(0, WARPS)[:, None], tl.arange(0, 16)[None, :]
        first = warp % K_WARPS * 256 + m % 8 * 32
        scales_ptr += (row + warp // K_WARPS * (PAIRS * PAIR) + m // 8 * second) * GROUPS
        low_group, high_group = first // GROUP, (STRIDE + first) // GROUP
        for step in tl.static_range(AHEAD):
            if step < STEPS:
                low_scales += _ask_groups(scales_ptr, low_group, step, PAIR * GROUPS, PAIRS, SLICE // GROUP, GROUPS)
                high_scales += _ask_groups(scales_ptr, high_group, step, PAIR * GROUPS, PAIRS, SLICE // GROUP, GROUPS)
    # Nothing of these is used, not even converted, before the end: whoever uses it waits for it.
    pair = tl.arange(0, ROW_WARPS)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    r = row + (pair * PAIR)[:, None, :] + (tl.arange(0, 2) * second)[None, :, None]
    scales = load_rows(scales_ptr, r, FP8 and GROUP == 0)
    bias, g = load_rows(bias_ptr, r, bias_ptr is not None), load_rows(norm_ptr, r, norm_ptr is not None)
    wait_for_previous(PDL)
    # Without PDL the loads below would come early, and registers not suffice. float32: the interpreter, without assembly.
    ask_before(not PDL and tl.float32 != DOT_DTYPE)
    residual = load_rows(residual_ptr, r, residual_ptr is not None)
    token = tl.arange(0, 1)
    squares = load_squares(squares_ptr, token, PARTS) if PARTS > 0 else tl.zeros((1, 1), tl.float32)

    k = tl.arange(0, WARPS * 256)  # each warp along rows has its own copy of x
    k = k // 256 % K_WARPS * 1024 + k // 32 % 8 * 128 + k % 32 if INT4 else k % SLICE
    x_ptr += k
    nothing = tl.zeros((WARPS, 16, COLUMNS), tl.float32)
    sums = ()  # type: tuple[Any, ...]
    for _ in tl.static_range(PAIRS):
        sums = sums + (nothing,)  # noqa: RUF005
    for step in tl.static_range(STEPS):
        own, w = w[:PAIRS], w[PAIRS:]
        low_scale, low_scales = low_scales[:PAIRS], low_scales[PAIRS:]
        high_scale, high_scales = high_scales[:PAIRS], high_scales[PAIRS:]
        if step + AHEAD < STEPS:
            w = w + _ask(weight_ptr, i % SLICE, step + AHEAD, FAR, PAIRS, SLICE, STRIDE, TILE)
            if INT4:
                at = step + AHEAD
                own_scales += _ask_int4(scales_ptr, group, at, PAIR, PAIRS, HALVES, SLICE // 32 * HALVES, GROUPS)
                if zeros_ptr is not None:
                    own_zeros += _ask_int4(zeros_ptr, group, at, PAIR, PAIRS, HALVES, SLICE // 32 * HALVES, GROUPS)
            elif GROUP:
                low_scales += _ask_groups(scales_ptr, low_group, step + AHEAD, PAIR * GROUPS, PAIRS, SLICE // GROUP, GROUPS)
                high_scales += _ask_groups(scales_ptr, high_group, step + AHEAD, PAIR * GROUPS, PAIRS, SLICE // GROUP, GROUPS)
        if INT4:
            ask_before(tl.float32 != DOT_DTYPE)
            columns = _int4_columns(x_ptr, k, step, WARPS, SLICE, IN, RAISE, DOT_DTYPE)
            offsets = _int4_offsets(columns, nothing, zeros_ptr is not None, HALVES, DOT_DTYPE)
        else:
            x = _columns(x_ptr, k, step, WARPS, SLICE, STRIDE, RAISE, DOT_DTYPE)
        if FP8:
            high_x = _columns(x_ptr + STRIDE, k, step, WARPS, SLICE, STRIDE, RAISE, DOT_DTYPE)
        new_sums = ()  # type: tuple[Any, ...]
        for p in tl.static_range(PAIRS):
            if INT4:
                sum = _int4_sum(
                    *(sums[p], _int4_rows(own[p], WARPS, DOT_DTYPE), columns, offsets, own_scales[p * HALVES :]),
                    *(own_zeros[p * HALVES :], nothing, zeros_ptr is not None, HALVES, DOT_DTYPE),
                )
            else:
                rows = _rows(own[p], WARPS)
            if FP8:
                low, high = pairs(rows, DOT_DTYPE)
                sum = tl.dot(low, x, nothing if GROUP else sums[p], input_precision="ieee")
                if GROUP:
                    sum = sums[p] + sum * low_scale[p][:, :, None]
                high_sum = tl.dot(high, high_x, nothing if GROUP else sum, input_precision="ieee")
                sum = sum + high_sum * high_scale[p][:, :, None] if GROUP else high_sum
            elif not INT4:
                sum = tl.dot(rows.to(DOT_DTYPE), x, sums[p], input_precision="ieee")
            new_sums = new_sums + (sum,)  # noqa: RUF005
        sums = new_sums
        own_scales, own_zeros = own_scales[PAIRS * HALVES :], own_zeros[PAIRS * HALVES :]

    factor = 1.0 / UNIT
    if PARTS > 0:
        factor = tl.sum(inverse_rms(squares, eps, IN, UNIT), 0)
    matched = (tl.arange(0, 16) % COLUMNS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    program = tl.cdiv(row, ROWS)  # again: not to be kept
    diagonals = ()  # type: tuple[Any, ...]
    for p in tl.static_range(PAIRS):
        diagonals = diagonals + (tl.sum(tl.where(matched[None], sums[p], 0.0), 2),)  # noqa: RUF005
    total = tl.reshape(_stacked(diagonals, PAIRS), [ROW_WARPS, K_WARPS, 2, 8, PAIRS])
    total = tl.sum(tl.sum(total, 3), 1) * factor  # of all pairs at once: warps meet here
    if FP8 and GROUP == 0:
        total *= scales
    if bias_ptr is not None:
        total += bias.to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(total, (0, 2, 1)))
        tl.store(out_ptr + row + pair, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty))
    else:
        if residual_ptr is not None:
            total += residual.to(tl.float32)
        rounded = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + r, rounded)
        if norm_ptr is not None:
            rounded = rounded.to(tl.float32)
            tl.store(scaled_ptr + r, (rounded * g.to(tl.float32) * SCALE).to(scaled_ptr.dtype.element_ty))
            own = tl.where(r >= program * ROWS, rounded * rounded, 0.0)
            tl.store(out_squares_ptr + program, tl.sum(tl.sum(tl.sum(own, 2), 1), 0))


def token_linear(
    x: Tensor,
    linear: Linear,
    out: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
    scaled: Scaled | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    next_norm: Tensor | None = None,
    next_scaled: Scaled | None = None,
    gated: bool = False,
    full_edge: bool = False,
) -> Tensor:
    """x `[1, in]` -> out `[1, N]` = linear(x), summed in float32, rounded once to out's type. With `scaled`, of the norm begun
    there; with `residual [1, N]`, added to it, and `next_norm [N]` begun in `next_scaled`; `gated`: silu of the first half of
    the rows times the second, `[1, N / 2]`. x and norms are of one type, and dense weights too, which have two bytes and `in` a
    multiple of 256 (`configs.multiplies`); of INT4, N is a multiple of 8, or gated of 32; all contiguous. full_edge: as in
    norm_linear.

    Bytes: the weights, once; x (by every program) and out stay in L2. Torch twin: `F.linear`, with what comes before and after.
    """
    weight, width = linear.weight, x.shape[1]
    raised = unit = 1.0
    zeros, rows_of_tile = None, 1
    if isinstance(weight, LowBit):
        words, scales, zeros, group, own, rows_of_tile = weight.words, weight.scales, weight.zeros, weight.group, piece(0.5), 8
        assert weight.shape[0] % (32 if gated else 8) == 0
        if not interpreted:
            raised, unit = RAISED.get(x.dtype, 1.0), SMALLEST.get(x.dtype, 1.0)
    elif isinstance(weight, Fp8):
        words, scales, group, own = weight.codes.view(torch.int16), weight.scales, weight.group, piece(1)
        if not interpreted:
            raised, unit = RAISED.get(x.dtype, 1.0), UNITS.get(x.dtype, 1.0)
    else:
        assert isinstance(weight, Tensor)
        assert multiplies(x.element_size(), width)
        words, scales, group, own = weight, None, 0, piece(2)
    n, k_warps = weight.shape[0] // (2 if gated else 1), tile.k_slice // own
    row_warps = tile.warps // k_warps
    _token_kernel[(triton.cdiv(n, tile.rows),)](
        *((x, None) if scaled is None else (scaled.x, scaled.squares)),
        *(words, scales, zeros, linear.bias, residual, out),
        *((None, None, None) if next_scaled is None else (next_norm, next_scaled.x, next_scaled.squares)),
        *(n, eps),
        IN=width,
        STRIDE=words.shape[1],
        TILE=rows_of_tile,
        GROUP=group,
        PARTS=len(scaled.squares) if scaled is not None else 0,
        RAISE=raised if scaled is None else 1.0,
        UNIT=unit * (scaled.scale if scaled is not None else raised),
        SCALE=next_scaled.scale if next_scaled is not None else 1.0,
        GATED=gated,
        PAIRS=tile.rows // (row_warps * (1 if gated else 2)),
        ROW_WARPS=row_warps,
        K_WARPS=k_warps,
        AHEAD=tile.ahead,
        DOT_DTYPE=dot_dtype(x.dtype, interpreted),
        PDL=pdl,
        maxnreg=tile.registers,
        **launch_options(tile.warps, 1, pdl and not full_edge),
    )
    return out
