"""Owns RMSNorm + gate and up projections + SiLU(gate) * up in one launch. Does not own the down projection (proj_residual)."""

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


@triton.jit
def _silu_mul(gate, up, bias_ptr, row, r, n, axis: tl.constexpr, HAS_BIAS: tl.constexpr):
    """silu(gate + its bias) * (up + its bias); rows of gate and up run along the first axis."""
    if HAS_BIAS:
        gate_bias = tl.load(bias_ptr + row + r).to(tl.float32)
        up_bias = tl.load(bias_ptr + n + row + r).to(tl.float32)
        gate += tl.expand_dims(gate_bias, axis) if axis else gate_bias
        up += tl.expand_dims(up_bias, axis) if axis else up_bias
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
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS, n - ROWS)  # rows the last two blocks share get the same bits twice
    r = tl.arange(0, ROWS)
    k = tl.arange(0, K_SLICE)
    gate_ptr = weight_ptr + row.to(tl.int64) * IN
    up_ptr = weight_ptr + (n + row).to(tl.int64) * IN
    tile = r[:, None] * IN + k[None, :]
    w_gate = tl.load(gate_ptr + tile, eviction_policy="evict_first")
    w_up = tl.load(up_ptr + tile, eviction_policy="evict_first")
    g = tl.load(norm_ptr + k).to(tl.float32)
    wait_for_previous(PDL)
    x = tl.load(x_ptr + k).to(tl.float32)
    squares = x * x
    xg = (x * g)[None, :]
    gate = w_gate.to(tl.float32) * xg
    up = w_up.to(tl.float32) * xg
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    for s in tl.range(K_SLICE, DONE, K_SLICE, num_stages=STAGES):
        w_gate = tl.load(gate_ptr + s + tile, eviction_policy="evict_first")
        w_up = tl.load(up_ptr + s + tile, eviction_policy="evict_first")
        g = tl.load(norm_ptr + s + k).to(tl.float32)
        x = tl.load(x_ptr + s + k).to(tl.float32)
        squares += x * x
        xg = (x * g)[None, :]
        gate += w_gate.to(tl.float32) * xg
        up += w_up.to(tl.float32) * xg
    inverse = tl.rsqrt(rest_squares(tl.sum(squares, 0), x_ptr, IN, DONE) / IN + eps)
    gate = rest_dot(tl.sum(gate, 1), gate_ptr, r, x_ptr, norm_ptr, True, IN, DONE) * inverse
    up = rest_dot(tl.sum(up, 1), up_ptr, r, x_ptr, norm_ptr, True, IN, DONE) * inverse
    out = _silu_mul(gate, up, bias_ptr, row, r, n, 0, HAS_BIAS)
    tl.store(out_ptr + row + r, out.to(out_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["batch", "n"])
def _norm_gate_up_batch_kernel(
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
    gate_ptr = weight_ptr + row.to(tl.int64) * IN
    up_ptr = weight_ptr + (n + row).to(tl.int64) * IN
    tile = r[:, None] * IN + k[None, :]
    if EARLY:
        w_gate = tl.load(gate_ptr + tile)
        w_up = tl.load(up_ptr + tile)
    wait_for_previous(PDL)
    factor = tl.full((TOKENS,), 1.0, tl.float32)
    if RMS_FIRST:
        factor = inverse_rms(x_ptr, b, batch, eps, IN, K_SLICE, TOKENS)
    squares = tl.zeros((TOKENS, K_SLICE), tl.float32)
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    if EARLY:
        x, xg = token_slice(x_ptr, norm_ptr, factor, b, k, live, True, IN)
        squares += x * x
        xg = tl.trans(xg.to(DOT_DTYPE))
        gate = tl.dot(w_gate.to(DOT_DTYPE), xg, gate, input_precision="ieee")
        up = tl.dot(w_up.to(DOT_DTYPE), xg, up, input_precision="ieee")
    DONE: tl.constexpr = IN // K_SLICE * K_SLICE
    for s in range(K_SLICE if EARLY else 0, DONE, K_SLICE):
        w_gate = tl.load(gate_ptr + s + tile)
        w_up = tl.load(up_ptr + s + tile)
        x, xg = token_slice(x_ptr, norm_ptr, factor, b, s + k, live, True, IN)
        squares += x * x
        xg = tl.trans(xg.to(DOT_DTYPE))
        gate = tl.dot(w_gate.to(DOT_DTYPE), xg, gate, input_precision="ieee")
        up = tl.dot(w_up.to(DOT_DTYPE), xg, up, input_precision="ieee")
    if DONE < IN:
        inside = DONE + k < IN
        w_gate = tl.load(gate_ptr + DONE + tile, mask=inside[None, :], other=0.0)
        w_up = tl.load(up_ptr + DONE + tile, mask=inside[None, :], other=0.0)
        g = tl.load(norm_ptr + DONE + k, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + b[:, None] * IN + DONE + k[None, :], mask=live & inside[None, :], other=0.0).to(tl.float32)
        squares += x * x
        xg = tl.trans((x * g[None, :] * factor[:, None]).to(DOT_DTYPE))
        gate = tl.dot(w_gate.to(DOT_DTYPE), xg, gate, input_precision="ieee")
        up = tl.dot(w_up.to(DOT_DTYPE), xg, up, input_precision="ieee")
    if not RMS_FIRST:
        inverse = tl.rsqrt(tl.sum(squares, 1) / IN + eps)[None, :]
        gate *= inverse
        up *= inverse
    out = _silu_mul(gate, up, bias_ptr, row, r, n, 1, HAS_BIAS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b[None, :] * n + row + r[:, None], out, mask=b[None, :] < batch)


def norm_gate_up(
    x: Tensor, norm: Tensor, gate_up: Linear, eps: float, out: Tensor, tile: Tile, pdl: bool, interpreted: bool = False
) -> Tensor:
    """x `[B, C]` -> out `[B, F]` = silu(gate(h)) * up(h), h = RMSNorm(x) * norm; gate's rows come first in `gate_up [2F, C]`.
    float32 sums, rounded once. All contiguous; B is 1 to 16.

    A block takes the same rows of gate and up, so their product needs no second launch. The rest is as in norm_linear.
    Bytes: 2 * F * C weights, once; x and out stay in L2. Torch twin: `F.rms_norm`, two `F.linear`, `silu_mul_torch`.
    """
    batch, width = x.shape
    n = gate_up.weight.shape[0] // 2
    bias = gate_up.bias if gate_up.bias is not None else gate_up.weight
    shape = {"IN": width, "HAS_BIAS": gate_up.bias is not None, "ROWS": tile.rows, "K_SLICE": tile.k_slice, "PDL": pdl}
    grid = (triton.cdiv(n, tile.rows),)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl)
        _norm_gate_up_kernel[grid](x, norm, gate_up.weight, bias, out, n, eps, STAGES=tile.stages, **shape, **options)
    else:
        dot = dot_dtype(x.dtype, interpreted)
        shape |= {"EARLY": tile.early, "TOKENS": TOKENS, "RMS_FIRST": dot == tl.float16, "DOT_DTYPE": dot}
        options = launch_options(tile.warps, tile.stages, pdl)
        _norm_gate_up_batch_kernel[grid](x, norm, gate_up.weight, bias, out, batch, n, eps, **shape, **options)
    return out
