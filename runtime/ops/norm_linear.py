"""Owns RMSNorm + projection to float32 in one launch: q, k and v of a layer, and the final norm with the LM head.

Does not own the rotation, the per-head norms or the cache write: a block here holds single rows of q and k, the rotation pairs
rows half a head apart, and the per-head norm needs a whole head. All three stand at the head of the attention kernel, which has
q, k and v in registers anyway: no load and no launch more, for every family of models.
"""

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    TOKENS,
    dot_dtype,
    inverse_rms,
    launch_options,
    let_next_start,
    rest_dot,
    rest_squares,
    token_slice,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile


@triton.jit(do_not_specialize=["n"])
def _norm_linear_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n,
    eps,
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
    g = tl.load(norm_ptr + k).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + k).to(tl.float32)
    squares = x * x
    acc = w.to(tl.float32) * (x * g)[None, :]
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    for s in tl.range(K_SLICE, DONE, K_SLICE, num_stages=STAGES):
        w = tl.load(weight_ptr + s + tile, eviction_policy="evict_first")
        g = tl.load(norm_ptr + s + k).to(tl.float32)
        x = tl.load(x_ptr + s + k).to(tl.float32)
        squares += x * x
        acc += w.to(tl.float32) * (x * g)[None, :]
    square = rest_squares(tl.sum(squares, 0), x_ptr, IN, DONE)
    total = rest_dot(tl.sum(acc, 1), weight_ptr, r, x_ptr, norm_ptr, True, IN, DONE)
    total *= tl.rsqrt(square / IN + eps)
    if HAS_BIAS:
        total += tl.load(bias_ptr + row + r).to(tl.float32)
    tl.store(out_ptr + row + r, total)


@triton.jit(do_not_specialize=["batch", "n"])
def _norm_linear_batch_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    batch,
    n,
    eps,
    IN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    EARLY: tl.constexpr,
    TOKENS: tl.constexpr,
    RMS_FIRST: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)
    r = tl.arange(0, ROWS)
    k = tl.arange(0, K_SLICE)
    b = tl.arange(0, TOKENS)
    live = b[:, None] < batch
    weight_ptr += row.to(tl.int64) * IN
    tile = r[:, None] * IN + k[None, :]
    if EARLY:
        w = tl.load(weight_ptr + tile)
    wait_for_previous(PDL)
    factor = tl.full((TOKENS,), 1.0, tl.float32)
    if RMS_FIRST:
        factor = inverse_rms(x_ptr, b, batch, eps, IN, K_SLICE, TOKENS)
    squares = tl.zeros((TOKENS, K_SLICE), tl.float32)
    acc = tl.zeros((ROWS, TOKENS), tl.float32)
    if EARLY:
        x, xg = token_slice(x_ptr, norm_ptr, factor, b, k, live, True, IN)
        squares += x * x
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(xg.to(DOT_DTYPE)), acc, input_precision="ieee")
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    for s in range(K_SLICE if EARLY else 0, DONE, K_SLICE):
        w = tl.load(weight_ptr + s + tile)
        x, xg = token_slice(x_ptr, norm_ptr, factor, b, s + k, live, True, IN)
        squares += x * x
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(xg.to(DOT_DTYPE)), acc, input_precision="ieee")
    if DONE < IN:
        inside = DONE + k < IN
        w = tl.load(weight_ptr + DONE + tile, mask=inside[None, :], other=0.0)
        g = tl.load(norm_ptr + DONE + k, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + b[:, None] * IN + DONE + k[None, :], mask=live & inside[None, :], other=0.0).to(tl.float32)
        squares += x * x
        xg = x * g[None, :] * factor[:, None]
        acc = tl.dot(w.to(DOT_DTYPE), tl.trans(xg.to(DOT_DTYPE)), acc, input_precision="ieee")
    if not RMS_FIRST:
        acc *= tl.rsqrt(tl.sum(squares, 1) / IN + eps)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row + r).to(tl.float32)[:, None]
    tl.store(out_ptr + b[None, :].to(tl.int64) * n + row + r[:, None], acc, mask=b[None, :] < batch)


def norm_linear(
    x: Tensor,
    norm: Tensor,
    linear: Linear,
    eps: float,
    out: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
    full_edge: bool = False,
) -> Tensor:
    """x `[B, C]` -> out `[B, N]` float32 = linear(RMSNorm(x) * norm), never rounded. All contiguous; B is 1 to 16.

    The norm costs no pass: a block sums x² while it streams its rows and scales its sums at the end. B = 1 streams rows through
    registers; above, weights are the M side of `tl.dot` and tokens the N side, so weights are read once for all rows. Both load
    their first weight tile before they wait for the kernel before them.
    `full_edge` launches without the PDL attribute: the kernel starts when the one before has ended, and lets the next start.
    `interpreted` computes products in float32, for Triton's interpreter.
    Bytes: N * C weights, once; x (C a row, by every block) and out stay in L2. Torch twin: `F.rms_norm`, then `F.linear`.
    """
    batch, width = x.shape
    n = linear.weight.shape[0]
    bias = linear.bias if linear.bias is not None else linear.weight
    shape = {"IN": width, "HAS_BIAS": linear.bias is not None, "ROWS": tile.rows, "K_SLICE": tile.k_slice, "PDL": pdl}
    grid = (triton.cdiv(n, tile.rows),)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl and not full_edge)
        _norm_linear_kernel[grid](x, norm, linear.weight, bias, out, n, eps, STAGES=tile.stages, **shape, **options)
    else:
        dot = dot_dtype(x.dtype, interpreted)
        shape |= {"EARLY": tile.early, "TOKENS": TOKENS, "RMS_FIRST": dot == tl.float16, "DOT_DTYPE": dot}
        options = launch_options(tile.warps, tile.stages, pdl and not full_edge)
        _norm_linear_batch_kernel[grid](x, norm, linear.weight, bias, out, batch, n, eps, **shape, **options)
    return out
