"""Owns the projection with its residual in one launch: attention's output projection, and the MLP's down projection.

Does not own what it projects (attention, norm_gate_up).
"""

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import TOKENS, dot_dtype, launch_options, let_next_start, rest_dot, token_slice, wait_for_previous
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile


@triton.jit(do_not_specialize=["n"])
def _proj_residual_kernel(
    a_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    n,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two blocks share get the same bits twice
    r = tl.arange(0, ROWS)
    k = tl.arange(0, K_SLICE)
    weight_ptr += row.to(tl.int64) * IN
    tile = r[:, None] * IN + k[None, :]
    w = tl.load(weight_ptr + tile, eviction_policy="evict_first")
    wait_for_previous(PDL)
    a = tl.load(a_ptr + k).to(tl.float32)
    x = tl.load(x_ptr + row + r).to(tl.float32)
    acc = w.to(tl.float32) * a[None, :]
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    for s in tl.range(K_SLICE, DONE, K_SLICE, num_stages=STAGES):
        w = tl.load(weight_ptr + s + tile, eviction_policy="evict_first")
        a = tl.load(a_ptr + s + k).to(tl.float32)
        acc += w.to(tl.float32) * a[None, :]
    total = rest_dot(tl.sum(acc, 1), weight_ptr, r, a_ptr, a_ptr, False, IN, DONE)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row + r).to(tl.float32)
    tl.store(out_ptr + row + r, (x + total).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["batch", "n"])
def _proj_residual_batch_kernel(
    a_ptr,
    weight_ptr,
    bias_ptr,
    x_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    batch,
    n,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    SPLITS: tl.constexpr,
    EARLY: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.minimum(block * ROWS, n - ROWS)
    r = tl.arange(0, ROWS)
    k = tl.arange(0, K_SLICE)
    b = tl.arange(0, TOKENS)
    live = b[:, None] < batch
    weight_ptr += row.to(tl.int64) * IN
    tile = r[:, None] * IN + k[None, :]
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    SHARE: tl.constexpr = (IN // K_SLICE + SPLITS - 1) // SPLITS * K_SLICE
    start = split * SHARE
    end = tl.minimum(start + SHARE, DONE)
    if EARLY:
        w = tl.load(weight_ptr + start + tile)
    wait_for_previous(PDL)
    one = tl.full((TOKENS,), 1.0, tl.float32)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if EARLY:
        a, _ = token_slice(a_ptr, a_ptr, one, b, start + k, live, False, IN)
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(a.to(DOT_DTYPE)), acc, input_precision="ieee")
        start += K_SLICE
    for s in range(start, end, K_SLICE):
        w = tl.load(weight_ptr + s + tile)
        a, _ = token_slice(a_ptr, a_ptr, one, b, s + k, live, False, IN)
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(a.to(DOT_DTYPE)), acc, input_precision="ieee")
    if DONE < IN:
        inside = DONE + k < tl.where(split == SPLITS - 1, IN, 0)
        w = tl.load(weight_ptr + DONE + tile, mask=inside[None, :], other=0.0)
        a, _ = token_slice(a_ptr, a_ptr, one, b, DONE + k, live & inside[None, :], False, IN)
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(a.to(DOT_DTYPE)), acc, input_precision="ieee")

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
            acc += tl.load(bias_ptr + row + r).to(tl.float32)[:, None]
        out = b[None, :] * n + row + r[:, None]
        acc += tl.load(x_ptr + out, mask=b[None, :] < batch, other=0.0).to(tl.float32)
        tl.store(out_ptr + out, acc.to(out_ptr.dtype.element_ty), mask=b[None, :] < batch)


def proj_residual(
    a: Tensor,
    proj: Linear,
    x: Tensor,
    out: Tensor,
    partial: Tensor,
    counter: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """a `[B, in]`, x `[B, C]` -> out `[B, C]` = x + proj(a), summed in float32, rounded once. out must not be x: rows that the
    last two blocks share are written twice. All contiguous; B is 1 to 16.

    B = 1 streams rows; above, `tl.dot` with the weights on the M side, and in features split over `tile.splits` blocks where
    rows alone make too few blocks. Scratch, used where tile.splits > 1: partial float32 (blocks * splits * rows * 16), counter
    int32 (blocks), zero between launches.
    Bytes: C * in weights, once; a, x, out and the partials stay in L2. Torch twin: `x + F.linear(a, ...)`.
    """
    batch, width = a.shape
    n = proj.weight.shape[0]
    bias = proj.bias if proj.bias is not None else proj.weight
    shape = {"IN": width, "HAS_BIAS": proj.bias is not None, "ROWS": tile.rows, "K_SLICE": tile.k_slice, "PDL": pdl}
    blocks = triton.cdiv(n, tile.rows)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl)
        _proj_residual_kernel[(blocks,)](a, proj.weight, bias, x, out, n, STAGES=tile.stages, **shape, **options)
    else:
        shape |= {"EARLY": tile.early, "SPLITS": tile.splits, "TOKENS": TOKENS, "DOT_DTYPE": dot_dtype(a.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl)
        _proj_residual_batch_kernel[(blocks, tile.splits)](
            a, proj.weight, bias, x, out, partial, counter, batch, n, **shape, **options
        )
    return out
