"""Owns RMSNorm + gate and up projections + SiLU(gate) * up in one launch. Does not own the down projection (proj_residual)."""

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
    k = tl.arange(0, K_SLICE)
    b = tl.arange(0, TOKENS)
    live = b[:, None] < batch
    gate_ptr = weight_ptr + row.to(tl.int64) * IN
    up_ptr = weight_ptr + (n + row).to(tl.int64) * IN
    prefetch_rows(gate_ptr, r, 0, AHEAD, IN, PDL)
    prefetch_rows(up_ptr, r, 0, AHEAD, IN, PDL)
    wait_for_previous(PDL)
    squares = load_squares(squares_ptr, tl.arange(0, TOKENS), PARTS)
    gate = tl.zeros((ROWS, TOKENS), tl.float32)
    up = tl.zeros((ROWS, TOKENS), tl.float32)
    gate_ptr += r[:, None] * IN + k[None, :]
    up_ptr += r[:, None] * IN + k[None, :]
    scaled_ptr += b[:, None] * IN + k[None, :]
    SLICES: tl.constexpr = IN // K_SLICE
    for i in range(SLICES):
        s = (i + block * STAGGER) % SLICES * K_SLICE
        w_gate = tl.load(gate_ptr + s)
        w_up = tl.load(up_ptr + s)
        x = tl.trans(tl.load(scaled_ptr + s, mask=live, other=0.0).to(DOT_DTYPE))
        gate = tl.dot(w_gate.to(DOT_DTYPE), x, gate, input_precision="ieee")
        up = tl.dot(w_up.to(DOT_DTYPE), x, up, input_precision="ieee")
    DONE: tl.constexpr = SLICES * K_SLICE
    if DONE < IN:
        inside = DONE + k[None, :] < IN
        w_gate = tl.load(gate_ptr + DONE, mask=inside, other=0.0)
        w_up = tl.load(up_ptr + DONE, mask=inside, other=0.0)
        x = tl.trans(tl.load(scaled_ptr + DONE, mask=live & inside, other=0.0).to(DOT_DTYPE))
        gate = tl.dot(w_gate.to(DOT_DTYPE), x, gate, input_precision="ieee")
        up = tl.dot(w_up.to(DOT_DTYPE), x, up, input_precision="ieee")
    inverse = inverse_rms(squares, eps, IN, SCALE)[None, :]
    out = _silu_mul(gate * inverse, up * inverse, bias_ptr, row, r, n, 1, HAS_BIAS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + b[None, :] * n + row + r[:, None], out, mask=b[None, :] < batch)


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
    batch, width = x.shape
    n = gate_up.weight.shape[0] // 2
    bias = gate_up.bias if gate_up.bias is not None else gate_up.weight
    shape = {"IN": width, "HAS_BIAS": gate_up.bias is not None, "ROWS": tile.rows, "K_SLICE": tile.k_slice, "PDL": pdl}
    grid = (triton.cdiv(n, tile.rows),)
    if batch == 1:
        options = launch_options(tile.warps, 1, pdl)
        _norm_gate_up_kernel[grid](x, norm, gate_up.weight, bias, out, n, eps, STAGES=tile.stages, **shape, **options)
    else:
        assert scaled is not None
        shape |= scaled.constants | {"AHEAD": tile.ahead, "TOKENS": TOKENS, "DOT_DTYPE": dot_dtype(x.dtype, interpreted)}
        options = launch_options(tile.warps, tile.stages, pdl)
        _norm_gate_up_batch_kernel[grid](scaled.x, scaled.squares, gate_up.weight, bias, out, batch, n, eps, **shape, **options)
    return out
