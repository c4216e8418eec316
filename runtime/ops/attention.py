"""Owns decode attention in one launch: one query a row over the keys its slot holds, split over blocks of keys. On the fused
path it begins with the per-head norms, the rotation and the cache write; on the unfused path with nothing.

Does not own prefill attention (models.decoder, through SDPA) or the projections on either side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Attention, Rows
from runtime.ops._gemv import dot_dtype, launch_options, let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton

MAX_SPLITS = 64


@triton.jit
def share_of_keys(slot, position, split, splits, WINDOW: tl.constexpr, BLOCK: tl.constexpr, MIN_KEYS: tl.constexpr):
    """This split's keys [start, end) and the number of splits in use, at least 1.

    The keys of earlier positions that the query sees are shared out by their number alone; the current key is no part of it.
    """
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0)
    cached = tl.where(slot < 0, 0, position - first)
    wanted = tl.maximum(tl.minimum(tl.cdiv(cached, MIN_KEYS), splits), 1)
    share = tl.maximum(tl.cdiv(tl.cdiv(cached, wanted), BLOCK), 1) * BLOCK
    start = first + split * share
    return start, tl.minimum(start + share, first + cached), tl.maximum(tl.cdiv(cached, share), 1)


@triton.jit
def _normed(x, partner, g, g_other, eps, D: tl.constexpr):
    """Per-head RMSNorm of x `[N, D_PAD]` (0 past D) and of its rotation partners, by the same root mean square."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * inverse * g, partner * inverse * g_other


@triton.jit
def _old_keys(k_ptr, v_ptr, s, end, d, D: tl.constexpr, BLOCK: tl.constexpr):
    """Keys and values `[BLOCK, D_PAD]` of positions from s on, zeros past the end."""
    key = s + tl.arange(0, BLOCK)
    offsets = key[:, None].to(tl.int64) * D + d[None, :]
    mask = (key[:, None] < end) & (d < D)[None, :]
    return tl.load(k_ptr + offsets, mask=mask, other=0.0), tl.load(v_ptr + offsets, mask=mask, other=0.0)


@triton.jit
def _absorb(query, k, v, s, end, top, total, acc, DOT_DTYPE: tl.constexpr):
    """Take the keys and values of positions from s on into the running maximum, total and weighted sum (online softmax)."""
    scores = tl.dot(query, tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
    scores = tl.where((s + tl.arange(0, k.shape[0]))[None, :] < end, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    old = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * old + tl.sum(p, 1)
    acc = acc * old[:, None] + tl.dot(p.to(DOT_DTYPE), v.to(DOT_DTYPE), input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _load_sums(ptr, plane, mask, Q_PARTS: tl.constexpr):
    """The numbers at ptr, each the sum of Q_PARTS, `plane` apart."""
    total = tl.load(ptr, mask=mask, other=0.0)
    for i in tl.static_range(1, Q_PARTS):
        total += tl.load(ptr + i * plane, mask=mask, other=0.0)
    return total


@triton.jit
def _begin(
    q_ptr, k_ptr, v_ptr, cos, sin, norms, row, head, split, position, g, d, scale, eps,
    ROTATE: tl.constexpr, HEAD_NORM: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    Q_PARTS: tl.constexpr, DOT_DTYPE: tl.constexpr,
):  # fmt: skip
    """After the wait: the query, normed, rotated and scaled, in DOT_DTYPE, and maximum, total and weighted sum so far: those of
    the current key and value in split 0, which also writes them to the cache; elsewhere of nothing."""
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)  # the rotation pairs i with i + D/2
    q_mask = (g[:, None] < GROUP) & (d < D)[None, :]
    own = d < tl.where(split == 0, D, 0)
    now = position.to(tl.int64) * D + d[None, :]
    if ROTATE:
        # From the projection's float32 sums: per-head norms, rotation, and the cache write.
        width: tl.constexpr = (K * GROUP + 2 * K) * D
        plane = tl.num_programs(0) * width
        q_ptr += row * width
        k_row = (K * GROUP + head) * D
        q = _load_sums(q_ptr + (head * GROUP + g[:, None]) * D + d[None, :], plane, q_mask, Q_PARTS)
        q_other = _load_sums(q_ptr + (head * GROUP + g[:, None]) * D + other[None, :], plane, q_mask, Q_PARTS)
        k_now = _load_sums(q_ptr + k_row + d, plane, own, Q_PARTS)[None, :]
        k_other = _load_sums(q_ptr + k_row + other, plane, own, Q_PARTS)[None, :]
        v_now = _load_sums(q_ptr + k_row + K * D + d, plane, own, Q_PARTS)[None, :].to(v_ptr.dtype.element_ty)
        if HEAD_NORM:
            q_g, q_g_other, k_g, k_g_other = norms
            q, q_other = _normed(q, q_other, q_g, q_g_other, eps, D)
            k_now, k_other = _normed(k_now, k_other, k_g, k_g_other, eps, D)
        q = q * cos + q_other * sin
        k_now = (k_now * cos + k_other * sin).to(k_ptr.dtype.element_ty)
        tl.store(k_ptr + now, k_now, mask=own[None, :])
        tl.store(v_ptr + now, v_now, mask=own[None, :])
    else:
        q = tl.load(q_ptr + ((row * K + head) * GROUP + g[:, None]) * D + d[None, :], mask=q_mask, other=0.0).to(tl.float32)
        k_now = tl.load(k_ptr + now, mask=own[None, :], other=0.0)
        v_now = tl.load(v_ptr + now, mask=own[None, :], other=0.0)
    q *= scale * 1.4426950408889634  # scores in base 2: exp2 is one instruction
    top = tl.where(split == 0, tl.sum(q * k_now.to(tl.float32), 1), float("-inf"))
    total = tl.where(split == 0, tl.full((g.shape[0],), 1.0, tl.float32), 0.0)
    acc = tl.zeros((g.shape[0], d.shape[0]), tl.float32) + v_now.to(tl.float32)
    return q.to(DOT_DTYPE), top, total, acc


@triton.jit
def combine_splits(
    partial_ptr,
    stats_ptr,
    out_ptr,
    active,
    GROUP: tl.constexpr,
    GROUP_POW: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """The outputs `[GROUP, D]` of a (row, head) from the partial results of its splits, summed in their order.

    Four splits at a time: their loads depend on nothing and are one round trip, and each thread sums its own values.
    """
    g = tl.arange(0, GROUP_POW)
    d = tl.arange(0, D_PAD)
    top = tl.full((GROUP_POW,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW,), tl.float32)
    acc = tl.zeros((GROUP_POW, D_PAD), tl.float32)
    for first in range(0, active, 4):
        for i in tl.static_range(4):
            s = first + i
            used = g < tl.where(s < active, GROUP, 0)
            parts = partial_ptr + (s * GROUP + g[:, None]) * D_PAD + d[None, :]
            part = tl.load(parts, mask=used[:, None], other=0.0, cache_modifier=".cg")
            part_top = tl.load(stats_ptr + s * 2 * GROUP + g, mask=used, other=float("-inf"), cache_modifier=".cg")
            part_total = tl.load(stats_ptr + s * 2 * GROUP + GROUP + g, mask=used, other=0.0, cache_modifier=".cg")
            new_top = tl.maximum(top, part_top)
            old = tl.where(top == new_top, 1.0, tl.exp2(top - new_top))
            new = tl.where(used, tl.exp2(part_top - new_top), 0.0)
            total = total * old + part_total * new
            acc = acc * old[:, None] + part * new[:, None]
            top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * D + d[None, :], out, mask=(g[:, None] < GROUP) & (d[None, :] < D))


@triton.jit(do_not_specialize=["capacity", "splits"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    slots_ptr,
    positions_ptr,
    partial_ptr,
    stats_ptr,
    counter_ptr,
    capacity,
    splits,
    scale,
    eps,
    WINDOW: tl.constexpr,
    ROTATE: tl.constexpr,
    HEAD_NORM: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_POW: tl.constexpr,
    Q_PARTS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    g = tl.arange(0, GROUP_PAD)
    d = tl.arange(0, D_PAD)
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)  # the rotation pairs i with i + D/2
    d_mask = d < D
    q_mask = (g[:, None] < GROUP) & d_mask[None, :]

    start, end, active = share_of_keys(slot, position, split, splits, WINDOW, BLOCK, MIN_KEYS)

    # What no kernel of this step writes is loaded before the wait: old keys and values, and the tables. With stages Triton asks
    # for STAGES - 1 blocks of keys before the loop begins, so the wait is in its first turn; without, the first block is held
    # in registers.
    base = (tl.maximum(slot, 0) * K + head) * capacity * D
    k_ptr += base
    v_ptr += base
    if STAGES == 1:
        k, v = _old_keys(k_ptr, v_ptr, start, end, d, D, BLOCK)
    cos, sin = 0.0, 0.0
    norms = ()
    if ROTATE:
        angle = position.to(tl.int64) * half + tl.where(d < half, d, other)
        cos = tl.load(cos_ptr + angle, mask=d_mask, other=0.0)[None, :]
        sin = tl.load(sin_ptr + angle, mask=d_mask, other=0.0)[None, :]
        sin = tl.where(d[None, :] < half, -sin, sin)
    if HEAD_NORM:
        norms = (  # type: ignore[assignment]
            tl.load(q_norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :],
            tl.load(q_norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :],
            tl.load(k_norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)[None, :],
        )
    if STAGES == 1:
        wait_for_previous(PDL)
    if (slot < 0) | (split >= active):
        if STAGES > 1:
            wait_for_previous(PDL)
        if (slot < 0) & (split == 0):
            zeros = tl.zeros((GROUP_PAD, D_PAD), out_ptr.dtype.element_ty)
            tl.store(out_ptr + ((row * K + head) * GROUP + g[:, None]) * D + d[None, :], zeros, mask=q_mask)
        return

    first = start
    if STAGES == 1:
        query, top, total, acc = _begin(
            *(q_ptr, k_ptr, v_ptr, cos, sin, norms, row, head, split, position, g, d, scale, eps),
            *(ROTATE, HEAD_NORM, K, GROUP, D, Q_PARTS, DOT_DTYPE),
        )
        top, total, acc = _absorb(query, k, v, start, end, top, total, acc, DOT_DTYPE)
        first = start + BLOCK
    else:
        query = tl.zeros((GROUP_PAD, D_PAD), DOT_DTYPE)
        top = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
        total = tl.zeros((GROUP_PAD,), tl.float32)
        acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    for s in tl.range(first, end if STAGES == 1 else tl.maximum(end, start + 1), BLOCK, num_stages=STAGES):
        k, v = _old_keys(k_ptr, v_ptr, s, end, d, D, BLOCK)
        if STAGES > 1:  # noqa: SIM102
            if s == start:
                wait_for_previous(PDL)
                query, top, total, acc = _begin(
                    *(q_ptr, k_ptr, v_ptr, cos, sin, norms, row, head, split, position, g, d, scale, eps),
                    *(ROTATE, HEAD_NORM, K, GROUP, D, Q_PARTS, DOT_DTYPE),
                )
        top, total, acc = _absorb(query, k, v, s, end, top, total, acc, DOT_DTYPE)

    out_ptr += (row * K + head) * GROUP * D
    if active == 1:
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + g[:, None] * D + d[None, :], out, mask=q_mask)
        return
    # The last split of a (row, head) to arrive sums the partials in split order: the bits do not depend on which it is.
    cell = (row * K + head) * splits
    partial_ptr += cell * GROUP * D_PAD
    stats_ptr += cell * 2 * GROUP
    tl.store(partial_ptr + (split * GROUP + g[:, None]) * D_PAD + d[None, :], acc, mask=g[:, None] < GROUP)
    tl.store(stats_ptr + split * 2 * GROUP + g, top, mask=g < GROUP)
    tl.store(stats_ptr + split * 2 * GROUP + GROUP + g, total, mask=g < GROUP)
    tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
    arrived = tl.atomic_add(counter_ptr + row * K + head, 1, sem="acq_rel")
    if arrived == active - 1:
        combine_splits(partial_ptr, stats_ptr, out_ptr, active, GROUP, GROUP_POW, D, D_PAD)
        tl.store(counter_ptr + row * K + head, 0)


@dataclass(frozen=True)
class AttentionTile:
    """How keys are cut: a split takes at least min_keys keys, in blocks of `block`; at most `blocks_per_sm` blocks an SM."""

    block: int
    min_keys: int
    warps: int
    stages: int = 2
    blocks_per_sm: int = 2


def attention_tile(spec: Attention, batch: int, itemsize: int) -> AttentionTile:
    """Timed in whole steps on an H200: one row's splits hold all their keys in registers; batches' walk over them. float32,
    whose products no tensor core makes, takes what does not spill.
    """
    if itemsize > 2:
        return AttentionTile(16, 16, 8, 2)
    if batch == 1:
        return AttentionTile(128, 128, 4, 1)
    if spec.heads == spec.kv_heads:
        return AttentionTile(32, 32, 2, 4, blocks_per_sm=4)
    return AttentionTile(64, 64, 4, 3)


@dataclass(frozen=True)
class AttentionScratch:
    """Partial sums, their maxima and totals, and the counters, zero between launches; `splits` is the most a row may have."""

    splits: int
    partial: Tensor
    stats: Tensor
    counter: Tensor

    @classmethod
    def make(cls, batch: int, spec: Attention, device: torch.device, tile: AttentionTile) -> "AttentionScratch":
        """Scratch for `batch` rows; splits enough for `tile.blocks_per_sm` blocks an SM."""
        cells, heads, d = batch * spec.kv_heads, batch * spec.heads, triton.next_power_of_2(spec.head_dim)
        processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
        splits = max(1, min(MAX_SPLITS, tile.blocks_per_sm * processors // cells))
        return cls(
            splits,
            torch.empty(heads * splits * d, dtype=torch.float32, device=device),
            torch.empty(heads * splits * 2, dtype=torch.float32, device=device),
            torch.zeros(cells, dtype=torch.int32, device=device),
        )


def decode_attention(
    q: Tensor,
    spec: Attention,
    rows: Rows,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    tile: AttentionTile,
    rotate: bool = False,
    pdl: bool = False,
    interpreted: bool = False,
) -> Tensor:
    """q `[B, H, D]`, caches `[slots, K, S, D]`, all contiguous -> out `[B, H*D]`, idle rows zeros, which read no cache.

    With `rotate`, q is `[P, B, (H + 2K) * D]` float32, P parts of the raw sums of q, k and v: here they are added, q and k
    normed per head (where spec has the weights) and rotated, and k and v written to (slot, position). Then the current key and
    value come from q, not through the cache, and a slot may have one row a step.
    Flash decoding (arXiv 2311.01282 section 3). Keys of earlier positions are read before the wait: rows.slots and
    rows.positions must be written by a kernel with a full edge after it. The number of splits follows the length read on the
    device. `interpreted` computes products in float32, for Triton's interpreter.
    Bytes: K and V of every key seen, once; q, out and the partials stay in L2. Torch twin: attention_torch, behind rms_norm,
    rope_torch and cache_write_torch.
    """
    assert all(t.is_contiguous() for t in (k_cache, v_cache, q))
    group = spec.heads // spec.kv_heads
    group_pow = triton.next_power_of_2(group)
    has_norms = rotate and spec.q_norm is not None
    _attention_kernel[(len(out), spec.kv_heads, scratch.splits)](
        *(q, k_cache, v_cache, out, spec.cos, spec.sin),
        *((spec.q_norm, spec.k_norm) if has_norms else (q, q)),
        *(rows.slots, rows.positions, scratch.partial, scratch.stats, scratch.counter),
        *(k_cache.shape[2], scratch.splits, spec.scale, spec.eps),
        WINDOW=spec.window or 0,
        ROTATE=rotate,
        HEAD_NORM=has_norms,
        K=spec.kv_heads,
        GROUP=group,
        GROUP_PAD=max(16, group_pow),
        GROUP_POW=group_pow,
        Q_PARTS=len(q) if rotate else 1,
        D=spec.head_dim,
        D_PAD=triton.next_power_of_2(spec.head_dim),
        BLOCK=tile.block,
        MIN_KEYS=tile.min_keys,
        STAGES=tile.stages,
        DOT_DTYPE=dot_dtype(k_cache.dtype, interpreted),
        PDL=pdl,
        **launch_options(tile.warps, tile.stages, pdl),
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
