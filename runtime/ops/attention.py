"""Owns decode attention: one query a row over the keys its slot holds, split over blocks of keys, in one launch.

Does not own prefill attention (models.decoder, through SDPA) or what happens to q and k before it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Attention, Rows
from runtime.ops._triton import tl, triton

BLOCK = 64
MIN_BLOCKS = 2
"""Blocks of keys a split takes at least: below it, more splits cost more in combining than they save in streaming."""


@triton.jit
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    slots_ptr,
    positions_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    stride_slot,
    stride_head,
    scale,
    WINDOW: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MIN_BLOCKS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    g_mask = g[:, None] < GROUP
    d_mask = d[None, :] < D
    q_offsets = ((row * K + head) * GROUP + g[:, None]) * D + d[None, :]
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        if split == 0:
            tl.store(out_ptr + q_offsets, tl.zeros((GROUP_PAD, D_PAD), out_ptr.dtype.element_ty), mask=g_mask & d_mask)
        return
    length = tl.load(positions_ptr + row) + 1
    first_block = 0
    if WINDOW > 0:
        first_block = tl.maximum(length - WINDOW, 0) // BLOCK
    blocks = tl.cdiv(length, BLOCK) - first_block
    wanted = tl.minimum(tl.cdiv(blocks, MIN_BLOCKS), SPLITS)
    share = tl.cdiv(blocks, wanted)
    active = tl.cdiv(blocks, share)
    if split >= active:
        return
    start = (first_block + split * share) * BLOCK
    end = tl.minimum(start + share * BLOCK, length)

    # Scores in base 2: exp2 is one instruction, and the factor rides on the scale.
    q = (tl.load(q_ptr + q_offsets, mask=g_mask & d_mask, other=0.0).to(tl.float32) * (scale * 1.4426950408889634)).to(
        DOT_DTYPE
    )
    base = slot * stride_slot + head * stride_head
    top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    for s in range(start, end, BLOCK):
        key = s + tl.arange(0, BLOCK)
        mask = (key[:, None] < end) & d_mask
        offsets = base + key[:, None].to(tl.int64) * D + d[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0).to(DOT_DTYPE)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0).to(DOT_DTYPE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        seen = key[None, :] < end
        if WINDOW > 0:
            seen = seen & (key[None, :] >= length - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        old = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * old + tl.sum(p, axis=1)
        acc = acc * old[:, None] + tl.dot(p.to(DOT_DTYPE), v, input_precision="ieee")
        top = new_top

    if active == 1:
        tl.store(out_ptr + q_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=g_mask & d_mask)
        return
    # Partials go to a workspace; the last block of a (row, head) to arrive sums them in split order, so the bits do not
    # depend on which block that is.
    cell = (row * K + head) * SPLITS
    tile = g[:, None] * D_PAD + d[None, :]
    tl.store(partial_ptr + (cell + split) * GROUP_PAD * D_PAD + tile, acc)
    tl.store(stats_ptr + (cell + split) * 2 * GROUP_PAD + g, top)
    tl.store(stats_ptr + (cell + split) * 2 * GROUP_PAD + GROUP_PAD + g, total)
    tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
    arrived = tl.atomic_add(counter_ptr + row * K + head, 1, sem="acq_rel")
    if arrived == active - 1:
        top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
        for s in range(active):
            part = tl.load(partial_ptr + (cell + s) * GROUP_PAD * D_PAD + tile, cache_modifier=".cg")
            part_top = tl.load(stats_ptr + (cell + s) * 2 * GROUP_PAD + g, cache_modifier=".cg")
            part_total = tl.load(stats_ptr + (cell + s) * 2 * GROUP_PAD + GROUP_PAD + g, cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            old = tl.exp2(top - new_top)
            new = tl.exp2(part_top - new_top)
            total = total * old + part_total * new
            acc = acc * old[:, None] + part * new[:, None]
            top = new_top
        tl.store(out_ptr + q_offsets, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=g_mask & d_mask)
        tl.store(counter_ptr + row * K + head, 0)


@dataclass(frozen=True)
class AttentionWorkspace:
    """Scratch of one batch size: partial sums, their maxima and totals, and the counters, zero between launches."""

    splits: int
    partial: Tensor
    stats: Tensor
    counter: Tensor

    @classmethod
    def make(cls, batch: int, attention: Attention, device: torch.device, processors: int) -> "AttentionWorkspace":
        """Scratch for `batch` rows on a GPU of `processors` SMs; enough splits to give every SM two blocks at long lengths."""
        cells = batch * attention.kv_heads
        splits = max(1, min(64, triton.cdiv(2 * processors, cells)))
        group, d = _padded(attention)
        return cls(
            splits,
            torch.empty(cells * splits * group * d, dtype=torch.float32, device=device),
            torch.empty(cells * splits * group * 2, dtype=torch.float32, device=device),
            torch.zeros(cells, dtype=torch.int32, device=device),
        )


def _padded(attention: Attention) -> tuple[int, int]:
    """Rows and columns of a score tile: `tl.dot` wants 16 query rows, `tl.arange` a power of two."""
    group = attention.heads // attention.kv_heads
    return max(16, triton.next_power_of_2(group)), triton.next_power_of_2(attention.head_dim)


def decode_attention(
    q: Tensor,
    spec: Attention,
    rows: Rows,
    k_cache: Tensor,
    v_cache: Tensor,
    workspace: AttentionWorkspace,
    upcast: bool = False,
) -> Tensor:
    """q `[B, H, D]` contiguous, caches `[slots, K, S, D]` -> `[B, H*D]` in q's dtype; idle rows give zeros.

    Flash decoding (arXiv 2311.01282 section 3): keys are split by the length read on the device, from 1 to `workspace.splits`
    runs of at least MIN_BLOCKS blocks, so the split depends on batch size and length alone. `upcast` computes the products in
    float32, for Triton's interpreter.
    Bytes: K and V of every key seen, once; q, out and the partials stay in L2.
    """
    batch, heads, head_dim = q.shape
    group_pad, d_pad = _padded(spec)
    out = torch.empty((batch, heads * head_dim), dtype=q.dtype, device=q.device)
    _attention_kernel[(batch, spec.kv_heads, workspace.splits)](
        q,
        k_cache,
        v_cache,
        out,
        rows.slots,
        rows.positions,
        workspace.partial,
        workspace.stats,
        workspace.counter,
        k_cache.stride(0),
        k_cache.stride(1),
        spec.scale,
        WINDOW=spec.window or 0,
        K=spec.kv_heads,
        GROUP=heads // spec.kv_heads,
        GROUP_PAD=group_pad,
        D=head_dim,
        D_PAD=d_pad,
        BLOCK=BLOCK,
        SPLITS=workspace.splits,
        MIN_BLOCKS=MIN_BLOCKS,
        DOT_DTYPE=tl.float32
        if upcast or q.dtype == torch.float32
        else (tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16),
        num_warps=4,
        num_stages=3,
    )
    return out


def attention_torch(q: Tensor, spec: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """The torch twin: float32 softmax row by row. It reads slots and positions on the host, so it serves the CPU and tests."""
    batch, heads, head_dim = q.shape
    out = torch.zeros((batch, heads * head_dim), dtype=q.dtype, device=q.device)
    for row, (slot, position) in enumerate(zip(rows.slots.tolist(), rows.positions.tolist(), strict=True)):
        if slot < 0:
            continue
        first = max(0, position + 1 - spec.window) if spec.window else 0
        k = k_cache[slot, :, first : position + 1].float()  # [K, S', D]
        v = v_cache[slot, :, first : position + 1].float()
        grouped = q[row].float().view(spec.kv_heads, -1, head_dim)  # [K, G, D]
        weights = torch.softmax(grouped @ k.transpose(1, 2) * spec.scale, dim=-1)
        out[row] = (weights @ v).reshape(-1).to(q.dtype)
    return out
