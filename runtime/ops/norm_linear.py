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
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two blocks share get the same bits twice
    r = tl.arange(0, ROWS)
    weight_ptr += row.to(tl.int64) * IN
    w, g = first_slices(weight_ptr, r, norm_ptr, IN, K_SLICE, AHEAD)
    bias = load_rows(bias_ptr + row, r, HAS_BIAS)
    wait_for_previous(PDL)
    total, square = stream_rows(w, g, weight_ptr, r, x_ptr, norm_ptr, IN, K_SLICE, AHEAD)
    total *= tl.rsqrt(square / IN + eps)
    if HAS_BIAS:
        total += bias.to(tl.float32)
    tl.store(out_ptr + row + r, total)


@triton.jit(do_not_specialize=["batch", "n"])
def _norm_linear_batch_kernel(
    scaled_ptr,
    squares_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    out_ptr,
    batch,
    n,
    eps,
    IN: tl.constexpr,
    PARTS: tl.constexpr,
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
    bias = load_rows(bias_ptr + row, r, HAS_BIAS)
    acc = tokens_dot(
        *(scaled_ptr, squares_ptr, weight_ptr, scales_ptr, r, b, live, start, slices, block * STAGGER, end, eps),
        *(IN, PARTS, SCALE, K_SLICE, GROUP, DOT_DTYPE, PDL),
    )
    if HAS_BIAS:
        acc += tl.where(split == 0, bias.to(tl.float32), 0.0)[:, None]
    out_ptr += split.to(tl.int64) * batch * n
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
    """x `[B, C]` -> out `[P, B, N]` float32, whose sum over P is linear(RMSNorm(x) * norm), never rounded. All contiguous; B is
    1 to 16, P the tile's splits: a batch's in features may be shared out, for a reader that adds (attention).

    The norm costs no pass. B = 1, what token_linear leaves, streams rows through registers: a block sums x² while it streams
    its rows and scales its sums at the end; its first weight tile is loaded before the wait. Above, weights are the M side of
    `tl.dot` and tokens the N side, so weights are read once for all rows; x comes as `scaled`, multiplied with norm by the
    launch that made x.
    `full_edge` launches without the PDL attribute: the kernel starts when the one before has ended, and lets the next start.
    `interpreted` computes products in float32, for Triton's interpreter.
    Bytes: N * C weights, once; x (C a row, by every block) and out stay in L2. Torch twin: `F.rms_norm`, then `F.linear`.
    """
    batch, n = len(x), linear.weight.shape[0]
    weights, shape = operands(linear, tile, batch)
    shape |= {"PDL": pdl}
    grid = (triton.cdiv(n, tile.rows),)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl and not full_edge)
        _norm_linear_kernel[grid](x, norm, *weights[:2], out, n, eps, **shape, **options)
    else:
        assert scaled is not None
        assert len(out) == tile.splits
        shape |= scaled.constants | {"SPLITS": tile.splits, "TOKENS": TOKENS, "DOT_DTYPE": dot_dtype(x.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl and not full_edge)
        tensors = (scaled.x, scaled.squares, *weights, out)
        _norm_linear_batch_kernel[(*grid, tile.splits)](*tensors, batch, n, eps, **shape, **options)
    return out
