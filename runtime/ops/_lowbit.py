"""Owns what the kernels for INT4 weights share: how words of 4-bit weights become operands, and how rows are finished.

Does not own how the weights lie in memory (lowbit).
"""

from runtime.ops._triton import tl, triton

CODES = tl.constexpr("""{
    .reg .b32 a; shr.b32 a, $4, 8;
    and.b32 $0, $4, 0x000f000f; and.b32 $1, $4, 0x00f000f0; and.b32 $2, a, 0x000f000f; and.b32 $3, a, 0x00f000f0;
}""")


@triton.jit
def word_operands(words, ASM: tl.constexpr, DOT_DTYPE: tl.constexpr):
    """What the assembly makes of the words for each of four operands, two words at a time."""
    a, b, c, d = tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [words], dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
    )
    a, b = a.to(DOT_DTYPE, bitcast=True), b.to(DOT_DTYPE, bitcast=True)
    return a, b, c.to(DOT_DTYPE, bitcast=True), d.to(DOT_DTYPE, bitcast=True)


@triton.jit
def codes(words, DOT_DTYPE: tl.constexpr):
    """The words' codes for each of four operands, the second and fourth times 16; of types of 2 bytes, times their smallest
    number: below and just above the smallest normal number a type's values are as far apart as integers."""
    if tl.float32 == DOT_DTYPE:
        w = words.to(tl.int32)
        low, high = (w & 0xFF).to(tl.float32), ((w >> 8) & 0xFF).to(tl.float32)
        a, c = (w & 0xF).to(tl.float32), ((w >> 8) & 0xF).to(tl.float32)
        parts = (a, low - a, c, high - c)
    else:
        parts = word_operands(words, CODES, DOT_DTYPE)
    return parts


@triton.jit
def load_fixed(row, n, bias_ptr, norm_ptr, GATED: tl.constexpr):
    """What `finish` needs of weights: rows' bias, that of up and the next norm's weight, as they are stored."""
    bias, up_bias, norm = tl.zeros_like(row), tl.zeros_like(row), tl.zeros_like(row)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + row, mask=row < n, other=0.0)
        if GATED:
            up_bias = tl.load(bias_ptr + n + row, mask=row < n, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + row, mask=row < n, other=0.0)
    return bias, up_bias, norm


@triton.jit
def load_residual(residual_ptr, row, b, batch, n):
    """Rows `[rows, tokens]` of the residual, as they are stored; 0 where there is none."""
    residual = tl.zeros_like(row)[:, None]
    if residual_ptr is not None:
        mask = (b < batch)[None, :] & (row < n)[:, None]
        residual = tl.load(residual_ptr + b[None, :].to(tl.int64) * n + row[:, None], mask=mask, other=0.0)
    return residual


@triton.jit
def finish(sum, up, fixed, residual, row, own, b, batch, n, out_ptr, scaled_ptr, GATED: tl.constexpr, SCALE: tl.constexpr):
    """Store rows' sums `[rows, tokens]` with bias and residual, or silu(sum) * up; fixed, residual: of `load_fixed` and
    `load_residual`. With a residual the next norm begins, as in proj_residual: the rows times its weight are stored too, and
    each token's sum of squares over its `own` rows returned."""
    bias, up_bias, norm = fixed
    at = b[None, :].to(tl.int64) * n + row[:, None]
    mask = (b < batch)[None, :] & (row < n)[:, None]
    sum += bias.to(tl.float32)[:, None]
    if GATED:
        sum = sum / (1.0 + tl.exp(-sum)) * (up + up_bias.to(tl.float32)[:, None])
    x = (sum + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, x, mask=mask)
    x = x.to(tl.float32)
    if scaled_ptr is not None:
        tl.store(scaled_ptr + at, (x * norm.to(tl.float32)[:, None] * SCALE).to(out_ptr.dtype.element_ty), mask=mask)
    return tl.sum(tl.where(mask & own[:, None], x * x, 0.0), 0)
