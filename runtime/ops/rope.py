"""Owns the rotation of q and k, in place, one launch. Does not own the tables (models) or the per-head norm (unfused)."""

import torch
from torch import Tensor

from runtime.ops import Attention
from runtime.ops._triton import tl, triton


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF_PAD: tl.constexpr
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    if head < H:
        x_ptr = q_ptr + (row * H + head) * D
    else:
        x_ptr = k_ptr + (row * K + head - H) * D
    half: tl.constexpr = D // 2
    i = tl.arange(0, HALF_PAD)
    mask = i < half
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * half + i, mask=mask)
    sin = tl.load(sin_ptr + position * half + i, mask=mask)
    a = tl.load(x_ptr + i, mask=mask).to(tl.float32)
    b = tl.load(x_ptr + half + i, mask=mask).to(tl.float32)
    tl.store(x_ptr + i, (a * cos - b * sin).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(x_ptr + half + i, (b * cos + a * sin).to(x_ptr.dtype.element_ty), mask=mask)


def rope(q: Tensor, k: Tensor, attention: Attention, positions: Tensor) -> None:
    """Rotate q `[B, H, D]` and k `[B, K, D]` in place at `positions [B]`; contiguous, any float dtype, float32 arithmetic.

    Source: RoFormer (arXiv 2104.09864) in Hugging Face's half-split order: pairs are (i, i + D/2).
    Bytes: q and k read and written once, one row of each table read for every head.
    """
    grid = (q.shape[0], attention.heads + attention.kv_heads)
    _rope_kernel[grid](
        q,
        k,
        attention.cos,
        attention.sin,
        positions,
        H=attention.heads,
        K=attention.kv_heads,
        D=attention.head_dim,
        HALF_PAD=triton.next_power_of_2(attention.head_dim // 2),
        num_warps=1,
    )


def rope_torch(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The torch twin, also prefill's: x `[T, N, D]`, cos and sin `[T, D/2]` float32 -> rotated x in x's dtype."""
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
