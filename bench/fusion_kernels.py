"""Owns the Triton kernels of `bench fusion`, one for each shape of fusion, with their wrappers. Does not own what they are
compared with (fusion) or any kernel of the decode step (runtime.ops).
"""

from torch import Tensor

from runtime.ops._triton import tl, triton

SUB = 1024
"""Values of one eighth of an elementwise block: one Philox call gives eight uniforms of 16 bits."""
SOFTMAX, LAYER_NORM, RMS_NORM = range(3)
NONE, BIAS_GELU, RESIDUAL = range(3)
WIDEST = 32768
"""Values of a row that one block holds in registers; wider ones are read twice."""
WIDE_WARPS, WIDE_AN_SM = 16, 2
"""Of a block of a wider row, and how many of these an SM has at the least."""


@triton.jit
def _gelu(x, share):
    """gelu(x) / share, the tanh form: x * sigmoid(2 y), in base 2. Its quotient is the square of one approximate root: a
    division takes twice the instructions."""
    root = tl.rsqrt(share + share * tl.exp2(x * (-2.302208198 - 0.1029432397 * (x * x))))
    return x * root * root


@triton.jit
def _bias_gelu_dropout_kernel(x_ptr, bias_ptr, out_ptr, width, seed, limit, share, SUB: tl.constexpr, DEEP: tl.constexpr):
    i = tl.arange(0, SUB)
    column = tl.program_id(0) * (SUB if DEEP else 8 * SUB)
    start = tl.program_id(1).to(tl.int64) * width * (8 if DEEP else 1) + column
    step = width if DEEP else SUB  # from one of the eight stretches to the next
    x = ()
    for j in tl.static_range(8):  # asked for before the draws, which take as long as they are on their way
        x = x + (tl.load(x_ptr + start + j * step + i),)  # type: ignore[assignment]  # noqa: RUF005
    bias = tl.load(bias_ptr + column + i).to(tl.float32)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    draws = tl.randint4x(seed, program * SUB + i, 7)
    for j in tl.static_range(8):
        if j > 0 and not DEEP:
            bias = tl.load(bias_ptr + column + j * SUB + i).to(tl.float32)
        keep = draws[j // 2] << (16 * (j % 2)) >= limit.to(tl.uint32)  # by 16 of its bits
        y = tl.where(keep, _gelu(x[j].to(tl.float32) + bias, share), 0.0)
        tl.store(out_ptr + start + j * step + i, y.to(out_ptr.dtype.element_ty))


def bias_gelu_dropout(x: Tensor, bias: Tensor, out: Tensor, p: float, seed: int) -> Tensor:
    """x `[N, W]` -> dropout(gelu(x + bias)) in training mode; the mask is drawn again from the seed when wanted, not stored.
    W is a multiple of 1024; N is a multiple of 8, so that a block takes eight rows of some columns, or W is one of 8192.
    Bytes: x once, out once."""
    (rows, width), deep = x.shape, len(x) % 8 == 0
    assert width % (SUB if deep else 8 * SUB) == 0
    grid = (width // SUB, rows // 8) if deep else (width // (8 * SUB), rows)
    _bias_gelu_dropout_kernel[grid](x, bias, out, width, seed, round(p * 65536) << 16, 1 - p, SUB=SUB, DEEP=deep)
    return out


@triton.jit
def _row_kernel(x_ptr, weight_ptr, out_ptr, width, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < width
    x = tl.load(x_ptr + row * width + i, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        x = tl.where(inside, x, float("-inf"))
        x = tl.exp2((x - tl.max(x, 0)) * 1.4426950408889634)  # one instruction
        x = x / tl.sum(x, 0)
    else:
        if KIND == 1:
            x = tl.where(inside, x - tl.sum(x, 0) / width, 0.0)
        x = x * tl.rsqrt(tl.sum(x * x, 0) / width + eps) * tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + i, x.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _wide_row_kernel(x_ptr, weight_ptr, out_ptr, width, eps, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * width
    lane = tl.arange(0, BLOCK // 8)
    i = lane[:, None] * 8 + tl.arange(0, 8)[None, :]  # a lane's eight values are one thread's: summed at once, in registers
    top = tl.full((BLOCK // 8,), -1e38, tl.float32)  # not -inf, from which nothing can be taken
    total = tl.zeros((BLOCK // 8,), tl.float32)
    squares = tl.zeros((BLOCK // 8,), tl.float32)
    shift = 0.0
    if KIND == 1:  # near the mean: a variance of what is left does not cancel
        shift = tl.sum(tl.load(x_ptr + row + tl.arange(0, 32)).to(tl.float32), 0) / 32
    for s in range(0, width, BLOCK):  # each lane keeps its own maximum and sums: no reduction over lanes inside the loop
        x = tl.load(x_ptr + row + s + i, eviction_policy="evict_last").to(tl.float32)
        if KIND == 0:
            new = tl.maximum(top, tl.max(x, 1) * 1.4426950408889634)
            total = total * tl.exp2(top - new) + tl.sum(tl.exp2(x * 1.4426950408889634 - new[:, None]), 1)
            top = new
        else:
            x -= shift
            total += tl.sum(x, 1)
            squares += tl.sum(x * x, 1)
    if KIND == 0:
        shift = tl.max(top, 0)
        scale = 1.0 / tl.sum(total * tl.exp2(top - shift), 0)
    else:
        mean = tl.sum(total, 0) / width if KIND == 1 else 0.0
        scale = tl.rsqrt(tl.sum(squares, 0) / width - mean * mean + eps)
        shift = (shift + mean) * scale
    for s in range(0, width, BLOCK):
        at = width - BLOCK - s + i  # from the end, which is the likeliest still in L2
        x = tl.load(x_ptr + row + at, eviction_policy="evict_first").to(tl.float32)
        if KIND == 0:
            y = tl.exp2(x * 1.4426950408889634 - shift) * scale
        else:
            y = (x * scale - shift) * tl.load(weight_ptr + at).to(tl.float32)
        tl.store(out_ptr + row + at, y.to(out_ptr.dtype.element_ty), eviction_policy="evict_first")


def row_reduction(x: Tensor, weight: Tensor, out: Tensor, kind: int, widest: int = WIDEST) -> Tensor:
    """x `[N, W]` -> softmax, LayerNorm or RMSNorm (times weight `[W]`) of each row, float32 inside. A row to a block: in
    registers up to `widest`, else by the online form (arXiv 1805.02867), where W is a multiple of 8192, or of `widest` if that
    is less (a power of two from 32 on). Bytes: x once, out once; x again in the online form, from L2 if the rows in flight fit
    it."""
    rows, width = x.shape
    if width <= widest:
        block = triton.next_power_of_2(width)
        _row_kernel[(rows,)](x, weight, out, width, 1e-6, KIND=kind, BLOCK=block, num_warps=max(4, min(32, block // 1024)))
    else:
        block = min(8192, widest)
        assert width % block == 0
        _wide_row_kernel[(rows,)](x, weight, out, width, 1e-6, KIND=kind, BLOCK=block, num_warps=WIDE_WARPS)
    return out


@triton.jit
def _gemm_kernel(
    a_ptr,
    b_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    M,
    N,
    K,
    EPILOGUE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    blocks_n = tl.cdiv(N, BN)
    group = 8 * blocks_n  # eight rows of blocks at a time, so that their b is still in L2
    first = tl.program_id(0) // group * 8
    height = tl.minimum(tl.cdiv(M, BM) - first, 8)
    m = (first + tl.program_id(0) % group % height) * BM + tl.arange(0, BM)
    n = tl.program_id(0) % group // height * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for s in range(0, K, BK):
        a = tl.load(a_ptr + m[:, None] * K + s + k[None, :])
        b = tl.load(b_ptr + n[None, :] * K + s + k[:, None])
        acc = tl.dot(a.to(DOT), b.to(DOT), acc)
    cells = m[:, None].to(tl.int64) * N + n[None, :]
    if EPILOGUE == 1:
        acc = _gelu(acc + tl.load(bias_ptr + n).to(tl.float32)[None, :], 1.0)
    if EPILOGUE == 2:
        acc += tl.load(residual_ptr + cells).to(tl.float32)
    tl.store(out_ptr + cells, acc.to(out_ptr.dtype.element_ty))


def gemm(
    a: Tensor, b: Tensor, bias: Tensor, residual: Tensor, out: Tensor, epilogue: int, block: tuple[int, int, int]
) -> Tensor:
    """a `[M, K]`, b `[N, K]` -> a b^T `[M, N]`, and in the epilogue nothing, gelu(. + bias `[N]`), or + residual `[M, N]`; M, N
    and K are multiples of the block. Bytes: a and b about once through L2, out once, the residual once."""
    (m, k), n, (bm, bn, bk) = a.shape, b.shape[0], block
    assert m % bm == n % bn == k % bk == 0
    dot = tl.bfloat16 if a.is_cuda else tl.float32
    shape = {"EPILOGUE": epilogue, "BM": bm, "BN": bn, "BK": bk, "DOT": dot}
    _gemm_kernel[(m // bm * (n // bn),)](a, b, bias, residual, out, m, n, k, **shape, num_warps=8, num_stages=3)
    return out


@triton.jit
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, T, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr
):
    head = tl.program_id(1).to(tl.int64) * T * D
    d = tl.arange(0, D)
    at = (tl.program_id(0) * BQ + tl.arange(0, BQ))[:, None] * D + d[None, :]
    q = tl.load(q_ptr + head + at).to(DOT)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, D), tl.float32)
    for s in range(0, T, BK):
        key = s + tl.arange(0, BK)
        k = tl.load(k_ptr + head + key[None, :] * D + d[:, None]).to(DOT)
        v = tl.load(v_ptr + head + key[:, None] * D + d[None, :]).to(DOT)
        scores = tl.dot(q, k) * (scale * 1.4426950408889634)
        new = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        old = tl.exp2(top - new)
        total = total * old + tl.sum(p, 1)
        acc = tl.dot(p.to(DOT), v, acc * old[:, None])
        top = new
    tl.store(out_ptr + head + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty))


def attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor, block: tuple[int, int]) -> Tensor:
    """q, k, v `[H, T, D]` -> softmax(q k^T / sqrt(D)) v, whose scores `[H, T, T]` never leave the SM (arXiv 2205.14135); T is a
    multiple of both blocks. Bytes: q, k, v about once through L2, out once."""
    heads, t, d = q.shape
    assert t % block[0] == t % block[1] == 0
    dot = tl.bfloat16 if q.is_cuda else tl.float32
    shape = {"D": d, "BQ": block[0], "BK": block[1], "DOT": dot}
    _attention_kernel[(t // block[0], heads)](q, k, v, out, d**-0.5, t, **shape, num_warps=8, num_stages=3)
    return out


@triton.jit
def _links_kernel(x_ptr, out_ptr, LINKS: tl.constexpr, LIVE: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i).to(tl.float32)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, LINKS, LIVE):
        link = (first + tl.arange(0, LIVE)).to(tl.float32)
        y = x[None, :] * (link[:, None] - LINKS / 2) / LINKS
        y = y * y - y  # [LIVE, BLOCK]: all of them are wanted again once their maximum is known
        new = tl.maximum(top, tl.max(y, 0))
        p = tl.exp(y - new[None, :])
        old = tl.exp(top - new)
        total = total * old + tl.sum(p, 0)
        acc = acc * old + tl.sum(p * y, 0)
        top = new
    tl.store(out_ptr + i, (acc / total).to(out_ptr.dtype.element_ty))


def links(x: Tensor, out: Tensor, count: int, live: int, block: int) -> Tensor:
    """x `[N]` -> sum of y_i softmax(y)_i over `count` functions y_i of x, `live` of them in registers at a time. N is a
    multiple of `block`. Bytes: x once, out once, unless registers spill."""
    _links_kernel[(x.numel() // block,)](x, out, LINKS=count, LIVE=live, BLOCK=block, num_warps=4)
    return out
