"""Owns the projection with its residual in one launch: attention's output projection, and the MLP's down projection.

Does not own what it projects (attention, norm_gate_up).
"""

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    STAGGER,
    TOKENS,
    Scaled,
    dot_dtype,
    first_slices,
    launch_options,
    let_next_start,
    load_rows,
    operands,
    share_of_slices,
    stream_rows,
    tokens_dot,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile


@triton.jit(do_not_specialize=["n"])
def _proj_residual_kernel(
    a_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    n,
    IN: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two blocks share get the same bits twice
    r = tl.arange(0, ROWS)
    weight_ptr += row.to(tl.int64) * IN
    w, g = first_slices(weight_ptr, r, None, IN, K_SLICE, AHEAD)
    bias = load_rows(bias_ptr + row, r, HAS_BIAS)
    next_g = load_rows(norm_ptr, row + r, norm_ptr is not None)
    wait_for_previous(PDL)
    residual = tl.load(x_ptr + row + r).to(tl.float32)
    total, _ = stream_rows(w, g, weight_ptr, r, a_ptr, None, IN, K_SLICE, AHEAD)
    if HAS_BIAS:
        total += bias.to(tl.float32)
    x = (residual + total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row + r, x)
    if norm_ptr is not None:  # as in a batch
        x = x.to(tl.float32)
        tl.store(scaled_ptr + row + r, (x * next_g.to(tl.float32) * SCALE).to(out_ptr.dtype.element_ty))
        own = row + r >= tl.program_id(0) * ROWS
        tl.store(squares_ptr + tl.program_id(0), tl.sum(tl.where(own, x * x, 0.0), 0))


@triton.jit(do_not_specialize=["batch", "n"])
def _proj_residual_batch_kernel(
    a_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    x_ptr,
    out_ptr,
    norm_ptr,
    scaled_ptr,
    squares_ptr,
    partial_ptr,
    counter_ptr,
    batch,
    n,
    IN: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.minimum(block * ROWS, n - ROWS)
    r = tl.arange(0, ROWS)
    b = tl.arange(0, TOKENS)
    live = b < batch
    weight_ptr += row.to(tl.int64) * IN
    if scales_ptr is not None:
        scales_ptr += row * (IN // GROUP if GROUP else 1)
    start, slices, end = share_of_slices(split, IN, K_SLICE, SPLITS)
    bias, g = load_rows(bias_ptr + row, r, HAS_BIAS), tl.load(norm_ptr + row + r)
    acc = tokens_dot(
        *(a_ptr, None, weight_ptr, scales_ptr, r, b, live, start, slices, block * STAGGER, end, 0.0),
        *(IN, 0, SCALE, K_SLICE, GROUP, DOT_DTYPE, PDL),
    )

    last = True
    if SPLITS > 1:
        # The last split of a block of rows to arrive sums all of them in split order: the bits do not depend on which it is.
        cell = r[:, None] * TOKENS + b[None, :]
        partial_ptr += block * SPLITS * ROWS * TOKENS
        tl.store(partial_ptr + split * ROWS * TOKENS + cell, acc)
        tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
        last = tl.atomic_add(counter_ptr + block, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros((ROWS, TOKENS), tl.float32)
            for i in tl.static_range(SPLITS):
                acc += tl.load(partial_ptr + i * ROWS * TOKENS + cell, cache_modifier=".cg")
            tl.store(counter_ptr + block, 0)
    if last:
        if HAS_BIAS:
            acc += bias.to(tl.float32)[:, None]
        at = b[None, :] * n + row + r[:, None]
        acc += tl.load(x_ptr + at, mask=live[None, :], other=0.0).to(tl.float32)
        x = acc.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, x, mask=live[None, :])
        # The next norm begins here: x * norm, and this block's part of the sum of x² (rows it shares with the block before
        # are counted there).
        x = x.to(tl.float32)
        tl.store(scaled_ptr + at, (x * g.to(tl.float32)[:, None] * SCALE).to(out_ptr.dtype.element_ty), mask=live[None, :])
        own = (row + r >= block * ROWS)[:, None]
        tl.store(squares_ptr + block * TOKENS + b, tl.sum(tl.where(own, x * x, 0.0), 0))


def proj_residual(
    a: Tensor,
    proj: Linear,
    x: Tensor,
    norm: Tensor,
    scaled: Scaled | None,
    out: Tensor,
    partial: Tensor,
    counter: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """a `[B, in]`, x `[B, C]` -> out `[B, C]` = x + proj(a), summed in float32, rounded once. out must not be x: rows that the
    last two blocks share are written twice. All contiguous; B is 1 to 16.

    B = 1 streams rows, here those that token_linear leaves; above, `tl.dot` with the weights on the M side, and in features
    split over `tile.splits` blocks where rows alone make too few blocks. The next norm, of weight `norm [C]`, is begun in
    `scaled` (one row: None where it is not). Scratch, used where tile.splits > 1: partial float32 (blocks * splits * rows *
    16), counter int32 (blocks), zero between launches.
    Bytes: C * in weights, once; a, x, out and the partials stay in L2. Torch twin: `x + F.linear(a, ...)`.
    """
    batch, n = len(a), proj.weight.shape[0]
    weights, shape = operands(proj, tile, batch)
    shape |= {"PDL": pdl}
    blocks = triton.cdiv(n, tile.rows)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl)
        begun = (None, None, None) if scaled is None else (norm, scaled.x, scaled.squares)
        shape |= {"SCALE": scaled.scale if scaled is not None else 1.0}
        _proj_residual_kernel[(blocks,)](a, *weights[:2], x, out, *begun, n, **shape, **options)
    else:
        assert scaled is not None
        shape |= {"SPLITS": tile.splits, "TOKENS": TOKENS}
        shape |= {"SCALE": scaled.scale, "DOT_DTYPE": dot_dtype(a.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl)
        tensors = (a, *weights, x, out, norm, scaled.x, scaled.squares, partial, counter)
        _proj_residual_batch_kernel[(blocks, tile.splits)](*tensors, batch, n, **shape, **options)
    return out
