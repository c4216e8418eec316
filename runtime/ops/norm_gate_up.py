"""Owns RMSNorm + gate and up projections + SiLU(gate) * up in one launch. Does not own the down projection (proj_residual)."""

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
    stream_rows,
    tokens_dot,
    wait_for_previous,
)
from runtime.ops._triton import tl, triton
from runtime.ops.configs import Tile


@triton.jit
def _silu_mul(gate, up):
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["n"])
def _norm_gate_up_kernel(
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
    both = tl.arange(0, 2 * ROWS)
    both = both % ROWS + both // ROWS * n  # rows of gate, then the same ones of up
    weight_ptr += row.to(tl.int64) * IN
    w, g = first_slices(weight_ptr, both, norm_ptr, IN, K_SLICE, AHEAD)
    bias = load_rows(bias_ptr + row, both, HAS_BIAS)
    wait_for_previous(PDL)
    total, square = stream_rows(w, g, weight_ptr, both, x_ptr, norm_ptr, IN, K_SLICE, AHEAD)
    total *= tl.rsqrt(square / IN + eps)
    if HAS_BIAS:
        total += bias.to(tl.float32)
    gate, up = tl.split(tl.trans(tl.reshape(total, [2, ROWS])))
    r = tl.arange(0, ROWS)
    tl.store(out_ptr + row + r, _silu_mul(gate, up).to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["batch", "n"])
def _norm_gate_up_batch_kernel(
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
    TOKENS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    block = tl.program_id(0)
    row = tl.minimum(block * ROWS, n - ROWS)
    both = tl.arange(0, 2 * ROWS)
    both = both % ROWS + both // ROWS * n
    b = tl.arange(0, TOKENS)
    live = b < batch
    weight_ptr += row.to(tl.int64) * IN
    if scales_ptr is not None:
        scales_ptr += row * (IN // GROUP if GROUP else 1)
    bias = load_rows(bias_ptr + row, both, HAS_BIAS)
    acc = tokens_dot(
        *(scaled_ptr, squares_ptr, weight_ptr, scales_ptr, both, b, live, 0, IN // K_SLICE, block * STAGGER, IN, eps),
        *(IN, PARTS, SCALE, K_SLICE, GROUP, DOT_DTYPE, PDL),
    )
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [2, ROWS, TOKENS]), (1, 2, 0)))
    r = tl.arange(0, ROWS)
    out = _silu_mul(gate, up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b[None, :] * n + row + r[:, None], out, mask=live[None, :])


def norm_gate_up(
    x: Tensor,
    norm: Tensor,
    scaled: Scaled | None,
    gate_up: Linear,
    eps: float,
    out: Tensor,
    tile: Tile,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """x `[B, C]` -> out `[B, F]` = silu(gate(h)) * up(h), h = RMSNorm(x) * norm; gate's rows come first in `gate_up [2F, C]`.
    float32 sums, rounded once. All contiguous; B is 1 to 16.

    A block takes the same rows of gate and up, so their product needs no second launch. The rest is as in norm_linear.
    Bytes: 2 * F * C weights, once; x and out stay in L2. Torch twin: `F.rms_norm`, two `F.linear`, `silu_mul_torch`.
    """
    batch, n = len(x), gate_up.weight.shape[0] // 2
    weights, shape = operands(gate_up, tile, batch)
    shape |= {"PDL": pdl}
    grid = (triton.cdiv(n, tile.rows),)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl)
        _norm_gate_up_kernel[grid](x, norm, *weights[:2], out, n, eps, **shape, **options)
    else:
        assert scaled is not None
        shape |= scaled.constants | {"TOKENS": TOKENS, "DOT_DTYPE": dot_dtype(x.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl)
        _norm_gate_up_batch_kernel[grid](scaled.x, scaled.squares, *weights, out, batch, n, eps, **shape, **options)
    return out
