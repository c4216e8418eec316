"""Owns the products of one token with dense weights of two bytes, through the tensor cores: QKV, output, gate and up, down and
the LM head are one kernel here. Does not own float32, other widths or FP8 (norm_linear, proj_residual, norm_gate_up).

A warp reads 512 bytes of a row at a time, 16 a lane, and the same 256 places of x. To the tensor cores (PTX ISA, mma.m16n8k16)
they are eight rows of weights and eight columns of x: lane 4c + t holds piece c of both, so that entry (c, c) of the product is
piece c's part of the sum, and the other entries mean nothing. A second row of weights makes rows 8 to 15. So weights and x are
used where a load puts them, without a conversion, and a pair of rows takes four registers to sum in, whatever a slice holds:
a thread's registers are for weights on their way.
"""

from typing import Any  # noqa: F401 (comments tell types)

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
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
from runtime.ops.configs import PIECE, Tile, multiplies

COLUMNS = 8
"""Columns of the smallest tensor core product, and pieces of 32 in features that a warp takes of a row at a time."""


@triton.jit
def _ask(weight_ptr, step, far, PAIRS: tl.constexpr, SLICE: tl.constexpr):
    """One step's slices of each of a warp's pairs of rows, `far` numbers apart."""
    w = ()
    for p in tl.static_range(PAIRS):
        w = w + (tl.load(weight_ptr + far * p + step * SLICE, eviction_policy="evict_first"),)  # type: ignore[assignment]  # noqa: RUF005
    return w


@triton.jit
def _operands(numbers, BATCH: tl.constexpr, ROWS: tl.constexpr):
    """What lanes hold, warp after warp, as rows or columns of two products of 16 in features: `[BATCH, ROWS, 16]` each."""
    # row (of 16: two times eight), warp, piece, lane of four, product, half, pair -> warp, row, half, lane, pair, product
    parts = tl.reshape(numbers, [ROWS // 8, BATCH, 8, 4, 2, 2, 2])
    return tl.split(tl.reshape(tl.permute(parts, (1, 0, 2, 5, 3, 6, 4)), [BATCH, ROWS, 16, 2]))


@triton.jit(do_not_specialize=["n"], repr=named_by_place("token"))
def _token_kernel(
    x_ptr, squares_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, norm_ptr, scaled_ptr, out_squares_ptr, n, eps,
    IN: tl.constexpr, PARTS: tl.constexpr, SCALE: tl.constexpr, GATED: tl.constexpr, PAIRS: tl.constexpr,
    ROW_WARPS: tl.constexpr, K_WARPS: tl.constexpr, AHEAD: tl.constexpr, COLUMNS: tl.constexpr, DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    WARPS: tl.constexpr = ROW_WARPS * K_WARPS
    SLICE: tl.constexpr = K_WARPS * 256
    STEPS: tl.constexpr = IN // SLICE
    PAIR: tl.constexpr = 1 if GATED else 2  # rows of the output that a pair of rows makes
    ROWS: tl.constexpr = ROW_WARPS * PAIRS * PAIR
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two programs share get the same bits twice
    second = n if GATED else 1  # from a pair's first row to its second: a row of gate and of up, or neighbours
    i = tl.arange(0, 2 * WARPS * 256)
    near = (i // SLICE % ROW_WARPS * (PAIRS * PAIR) + i // (WARPS * 256) * second) * IN + i % SLICE
    weight_ptr += row.to(tl.int64) * IN + near
    w = ()  # type: tuple[Any, ...]
    for step in tl.static_range(AHEAD):
        if step < STEPS:
            w = w + _ask(weight_ptr, step, PAIR * IN, PAIRS, SLICE)
    # Nothing of these is used, not even converted, before the end: whoever uses it waits for it.
    pair = tl.arange(0, ROW_WARPS) * (PAIRS * PAIR)
    r = row + pair[:, None] + (tl.arange(0, 2) * second)[None, :]
    bias, g, residual = (), (), ()  # type: tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]
    for p in tl.static_range(PAIRS):
        bias = bias + (load_rows(bias_ptr, r + p * PAIR, bias_ptr is not None),)  # noqa: RUF005
        g = g + (load_rows(norm_ptr, r + p * PAIR, norm_ptr is not None),)  # noqa: RUF005
    wait_for_previous(PDL)
    # Without PDL the loads below would come early, and registers not suffice. float32: the interpreter, without assembly.
    ask_before(not PDL and tl.float32 != DOT_DTYPE)
    for p in tl.static_range(PAIRS):
        residual = residual + (load_rows(residual_ptr, r + p * PAIR, residual_ptr is not None),)  # noqa: RUF005
    token = tl.arange(0, 1)
    squares = load_squares(squares_ptr, token, PARTS) if PARTS > 0 else tl.zeros((1, 1), tl.float32)

    x_ptr += tl.arange(0, WARPS * 256) % SLICE  # each warp along rows has its own copy
    sums = ()  # type: tuple[Any, ...]
    for _ in tl.static_range(PAIRS):
        sums = sums + (tl.zeros((WARPS, 16, COLUMNS), tl.float32),)  # noqa: RUF005
    for step in tl.static_range(STEPS):
        own = w[:PAIRS]
        w = w[PAIRS:]
        if step + AHEAD < STEPS:
            w = w + _ask(weight_ptr, step + AHEAD, PAIR * IN, PAIRS, SLICE)
        x, other_x = _operands(tl.load(x_ptr + step * SLICE).to(DOT_DTYPE), WARPS, COLUMNS)
        x, other_x = tl.permute(x, (0, 2, 1)), tl.permute(other_x, (0, 2, 1))
        new_sums = ()  # type: tuple[Any, ...]
        for p in tl.static_range(PAIRS):
            rows, other_rows = _operands(own[p].to(DOT_DTYPE), WARPS, 16)
            sum = tl.dot(rows, x, sums[p], input_precision="ieee")
            new_sums = new_sums + (tl.dot(other_rows, other_x, sum, input_precision="ieee"),)  # noqa: RUF005
        sums = new_sums

    factor = 1.0
    if PARTS > 0:
        factor = tl.sum(inverse_rms(squares, eps, IN, SCALE), 0)
    matched = (tl.arange(0, 16) % COLUMNS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    program = tl.cdiv(row, ROWS)  # again: not to be kept
    own_squares = 0.0
    for p in tl.static_range(PAIRS):
        total = tl.reshape(tl.sum(tl.where(matched[None], sums[p], 0.0), 2), [ROW_WARPS, K_WARPS, 2, 8])
        total = tl.sum(tl.sum(total, 3), 1) * factor
        if bias_ptr is not None:
            total += bias[p].to(tl.float32)
        at = r + p * PAIR
        if GATED:
            gate, up = tl.split(total)
            tl.store(out_ptr + row + pair + p, (gate / (1.0 + tl.exp(-gate)) * up).to(out_ptr.dtype.element_ty))
        else:
            if residual_ptr is not None:
                total += residual[p].to(tl.float32)
            rounded = total.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, rounded)
            if norm_ptr is not None:
                rounded = rounded.to(tl.float32)
                scaled = rounded * g[p].to(tl.float32) * SCALE
                tl.store(scaled_ptr + at, scaled.to(scaled_ptr.dtype.element_ty))
                own_squares += tl.sum(tl.sum(tl.where(at >= program * ROWS, rounded * rounded, 0.0), 1), 0)
    if norm_ptr is not None:
        tl.store(out_squares_ptr + program, own_squares)


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
    the rows times the second, `[1, N / 2]`. x, weight and norms are of one type of two bytes, all contiguous, `in` a multiple
    of 256 (`configs.multiplies`). full_edge: as in norm_linear.

    Bytes: the weights, once; x (by every program) and out stay in L2. Torch twin: `F.linear`, with what comes before and after.
    """
    weight = linear.weight
    assert isinstance(weight, Tensor)
    assert multiplies(x.element_size(), x.shape[1])
    n, k_warps = weight.shape[0] // (2 if gated else 1), tile.k_slice // PIECE
    row_warps = tile.warps // k_warps
    begun = scaled or next_scaled
    _token_kernel[(triton.cdiv(n, tile.rows),)](
        *((x, None) if scaled is None else (scaled.x, scaled.squares)),
        *(weight, linear.bias, residual, out),
        *((None, None, None) if next_scaled is None else (next_norm, next_scaled.x, next_scaled.squares)),
        *(n, eps),
        IN=x.shape[1],
        PARTS=len(scaled.squares) if scaled is not None else 0,
        SCALE=begun.scale if begun is not None else 1.0,
        GATED=gated,
        PAIRS=tile.rows // (row_warps * (1 if gated else 2)),
        ROW_WARPS=row_warps,
        K_WARPS=k_warps,
        AHEAD=tile.ahead,
        COLUMNS=COLUMNS,
        DOT_DTYPE=dot_dtype(x.dtype, interpreted),
        PDL=pdl,
        maxnreg=tile.registers,
        **launch_options(tile.warps, 1, pdl and not full_edge),
    )
    return out
