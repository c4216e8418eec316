"""Owns RMSNorm + projection to float32 in one launch: q, k and v of a layer, and the final norm with the LM head.

Does not own the rotation, the per-head norms or the cache write: a block here holds single rows of q and k, the rotation pairs
rows half a head apart, and the per-head norm needs a whole head. All three stand at the head of the attention kernel, which has
q, k and v in registers anyway: no load and no launch more, for every family of models.
"""

from torch import Tensor

from runtime.ops import Linear
from runtime.ops._gemv import (
    STAGGER,
    TOKENS,
    Scaled,
    dot_dtype,
    inverse_rms,
    launch_options,
    let_next_start,
    load_squares,
    prefetch_rows,
    rest_dot,
    rest_squares,
    tokens_dot,
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
    scaled_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    batch,
    n,
    eps,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    K_SLICE: tl.constexpr,
    AHEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    row = tl.minimum(block * ROWS, n - ROWS)
    r = tl.arange(0, ROWS)
    b = tl.arange(0, TOKENS)
    live = b < batch
    weight_ptr += row.to(tl.int64) * IN
    prefetch_rows(weight_ptr, r, 0, AHEAD, IN, PDL)
    wait_for_previous(PDL)
    squares = load_squares(squares_ptr, b, PARTS)
    acc = tokens_dot(scaled_ptr, weight_ptr, r, b, live, 0, IN // K_SLICE, block * STAGGER, IN, IN, K_SLICE, DOT_DTYPE)
    acc *= inverse_rms(squares, eps, IN, SCALE)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + row + r).to(tl.float32)[:, None]
    tl.store(out_ptr + b[None, :].to(tl.int64) * n + row + r[:, None], acc, mask=live[None, :])


def norm_linear(
    x: Tensor,
    norm: Tensor,
    scaled: Scaled | None,
    linear: Linear,
    eps: float,
    out: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
    full_edge: bool = False,
) -> Tensor:
    """x `[B, C]` -> out `[B, N]` float32 = linear(RMSNorm(x) * norm), never rounded. All contiguous; B is 1 to 16.

    The norm costs no pass. B = 1 streams rows through registers: a block sums x² while it streams its rows and scales its sums
    at the end; its first weight tile is loaded before the wait. Above, weights are the M side of `tl.dot` and tokens the N
    side, so weights are read once for all rows; x comes as `scaled`, multiplied with norm by the launch that made x.
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
        assert scaled is not None
        shape |= scaled.constants | {"AHEAD": tile.ahead, "TOKENS": TOKENS, "DOT_DTYPE": dot_dtype(x.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl and not full_edge)
        _norm_linear_batch_kernel[grid](scaled.x, scaled.squares, linear.weight, bias, out, batch, n, eps, **shape, **options)
    return out
