"""Owns the fused decode attention: per-head q and k norms, rotation, cache write and split-KV attention in one launch.

Does not own the plain attention of the unfused path (attention), whose maths it shares, or the projections on either side.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.ops import Attention, Rows
from runtime.ops._gemv import dot_dtype, launch_options, let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton
from runtime.ops.head_attention import _head_attention_kernel, share_of_keys

COMBINED_VALUES = 512
"""Float32 values of partial sums a warp of the combining block holds at once."""
MAX_SPLITS = 64


@triton.jit
def _normed(x, partner, g, g_other, eps, D: tl.constexpr):
    """Per-head RMSNorm of x `[N, D_PAD]` (0 past D) and of its rotation partners, by the same root mean square."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return x * inverse * g, partner * inverse * g_other


@triton.jit(do_not_specialize=["capacity", "splits"])
def _group_attention_kernel(
    qkv_ptr,
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
    HEAD_NORM: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP_POW: tl.constexpr,
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

    start, end, active = share_of_keys(slot, position, split, splits, WINDOW, BLOCK, MIN_KEYS)

    # What no kernel of this step writes is loaded before the wait: the first block of old keys and values, and the tables.
    base = (tl.maximum(slot, 0) * K + head) * capacity * D
    k_ptr += base
    v_ptr += base
    key = start + tl.arange(0, BLOCK)
    offsets = key[:, None].to(tl.int64) * D + d[None, :]
    mask = (key[:, None] < end) & d_mask[None, :]
    k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
    v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
    angle = position.to(tl.int64) * half + tl.where(d < half, d, other)
    cos = tl.load(cos_ptr + angle, mask=d_mask, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=d_mask, other=0.0)[None, :]
    sin = tl.where(d[None, :] < half, -sin, sin)
    if HEAD_NORM:
        q_g = tl.load(q_norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        q_g_other = tl.load(q_norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        k_g = tl.load(k_norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)[None, :]
        k_g_other = tl.load(k_norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)[None, :]
    wait_for_previous(PDL)
    q_mask = (g[:, None] < GROUP) & d_mask[None, :]
    if slot < 0:
        if split == 0:
            zeros = tl.zeros((GROUP_PAD, D_PAD), out_ptr.dtype.element_ty)
            tl.store(out_ptr + ((row * K + head) * GROUP + g[:, None]) * D + d[None, :], zeros, mask=q_mask)
        return
    if split >= active:
        return

    # Prologue: norm and rotate q (and in split 0 the current k), straight from the projection's float32 sums.
    qkv_ptr += row * (K * GROUP + 2 * K) * D
    q_ptr = qkv_ptr + (head * GROUP + g[:, None]) * D
    own = d < tl.where(split == 0, D, 0)
    q = tl.load(q_ptr + d[None, :], mask=q_mask, other=0.0)
    q_other = tl.load(q_ptr + other[None, :], mask=q_mask, other=0.0)
    k_now = tl.load(qkv_ptr + (K * GROUP + head) * D + d, mask=own, other=0.0)[None, :]
    k_other = tl.load(qkv_ptr + (K * GROUP + head) * D + other, mask=own, other=0.0)[None, :]
    v_now = tl.load(qkv_ptr + (K * GROUP + K + head) * D + d, mask=own, other=0.0)
    if HEAD_NORM:
        q, q_other = _normed(q, q_other, q_g, q_g_other, eps, D)
        k_now, k_other = _normed(k_now, k_other, k_g, k_g_other, eps, D)
    # Scores in base 2: exp2 is one instruction, and the factor rides on the scale.
    q = (q * cos + q_other * sin) * (scale * 1.4426950408889634)
    k_now = (k_now * cos + k_other * sin).to(k_ptr.dtype.element_ty)
    v_now = v_now[None, :].to(v_ptr.dtype.element_ty)
    now = position.to(tl.int64) * D + d[None, :]
    tl.store(k_ptr + now, k_now, mask=own[None, :])
    tl.store(v_ptr + now, v_now, mask=own[None, :])

    # Online softmax; it begins with the current key in split 0 and with nothing in the others.
    top = tl.where(split == 0, tl.sum(q * k_now.to(tl.float32), 1), float("-inf"))
    total = tl.where(split == 0, tl.full((GROUP_PAD,), 1.0, tl.float32), 0.0)
    acc = tl.zeros((GROUP_PAD, D_PAD), tl.float32) + v_now.to(tl.float32)
    scores = _scores(q, k, key, end, DOT_DTYPE)
    top, total, acc = _absorb(scores, v, top, total, acc, DOT_DTYPE)
    for s in tl.range(start + BLOCK, end, BLOCK, num_stages=STAGES):
        key = s + tl.arange(0, BLOCK)
        offsets = key[:, None].to(tl.int64) * D + d[None, :]
        mask = (key[:, None] < end) & d_mask[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        scores = _scores(q, k, key, end, DOT_DTYPE)
        top, total, acc = _absorb(scores, v, top, total, acc, DOT_DTYPE)

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
        _combine(partial_ptr, stats_ptr, out_ptr, active, GROUP, GROUP_POW, D, D_PAD, CHUNK)
        tl.store(counter_ptr + row * K + head, 0)


@triton.jit
def _scores(q, k, key, end, DOT_DTYPE: tl.constexpr):
    """q `[GROUP_PAD, D_PAD]` on keys k `[BLOCK, D_PAD]` -> `[GROUP_PAD, BLOCK]`, -inf past the split's end."""
    scores = tl.dot(q.to(DOT_DTYPE), tl.trans(k.to(DOT_DTYPE)), input_precision="ieee")
    return tl.where(key[None, :] < end, scores, float("-inf"))


@triton.jit
def _absorb(scores, v, top, total, acc, DOT_DTYPE: tl.constexpr):
    """Take a block of scores and values into the running maximum, total and weighted sum."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    old = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top[:, None])
    total = total * old + tl.sum(p, 1)
    acc = acc * old[:, None] + tl.dot(p.to(DOT_DTYPE), v.to(DOT_DTYPE), input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _combine(
    partial_ptr,
    stats_ptr,
    out_ptr,
    active,
    GROUP: tl.constexpr,
    GROUP_POW: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum the partials of all splits, CHUNK at a time so that their loads are one round trip, and store the output."""
    s = tl.arange(0, CHUNK)
    g = tl.arange(0, GROUP_POW)
    d = tl.arange(0, D_PAD)
    top = tl.full((GROUP_POW,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_POW,), tl.float32)
    acc = tl.zeros((GROUP_POW, D_PAD), tl.float32)
    for first in range(0, active, CHUNK):
        mask = (first + s[:, None] < active) & (g[None, :] < GROUP)
        stats = stats_ptr + (first + s[:, None]) * 2 * GROUP + g[None, :]
        cell = ((first + s[:, None]) * GROUP + g[None, :]) * D_PAD
        part = tl.load(
            partial_ptr + cell[:, :, None] + d[None, None, :], mask=mask[:, :, None], other=0.0, cache_modifier=".cg"
        )
        part_top = tl.load(stats, mask=mask, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats + GROUP, mask=mask, other=0.0, cache_modifier=".cg")
        # A group's padding rows have no maximum: 0 stands in, their sums are 0 and never stored.
        new_top = tl.maximum(top, tl.max(part_top, 0))
        safe_top = tl.where(g < GROUP, new_top, 0.0)
        old = tl.exp2(top - safe_top)
        new = tl.exp2(part_top - safe_top[None, :])
        total = total * old + tl.sum(part_total * new, 0)
        acc = acc * old[:, None] + tl.sum(part * new[:, :, None], 0)
        top = new_top
    out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + g[:, None] * D + d[None, :], out, mask=(g[:, None] < GROUP) & (d[None, :] < D))


@dataclass(frozen=True)
class AttentionTile:
    """How the keys are cut: a split takes at least min_keys keys, in blocks of `block`; at most `blocks_per_sm` blocks an SM.

    `group`: a block takes a KV head's whole group of queries, by `tl.dot` on queries padded to 16 rows; else one query head, by
    multiply and add, and K and V are read once for each head of the group.
    """

    block: int
    min_keys: int
    warps: int
    stages: int = 2
    blocks_per_sm: int = 2
    group: bool = True


@dataclass(frozen=True)
class AttentionScratch:
    """Partial sums, their maxima and totals, and the counters, zero between launches; `splits` is the most a row may have."""

    splits: int
    partial: Tensor
    stats: Tensor
    counter: Tensor

    @classmethod
    def make(
        cls, batch: int, spec: Attention, device: torch.device, processors: int, tile: AttentionTile
    ) -> "AttentionScratch":
        """Scratch for `batch` rows on a GPU of `processors` SMs; splits enough for `tile.blocks_per_sm` blocks an SM."""
        cells = batch * (spec.kv_heads if tile.group else spec.heads)
        splits = max(1, min(MAX_SPLITS, triton.cdiv(tile.blocks_per_sm * processors, cells)))
        heads, d = batch * spec.heads, triton.next_power_of_2(spec.head_dim)
        return cls(
            splits,
            torch.empty(heads * splits * d, dtype=torch.float32, device=device),
            torch.empty(heads * splits * 2, dtype=torch.float32, device=device),
            torch.zeros(cells, dtype=torch.int32, device=device),
        )


def fused_attention(
    qkv: Tensor,
    spec: Attention,
    rows: Rows,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    scratch: AttentionScratch,
    tile: AttentionTile,
    pdl: bool,
    interpreted: bool = False,
) -> Tensor:
    """qkv `[B, (H + 2K) * D]` float32, raw; caches `[slots, K, S, D]` contiguous -> out `[B, H*D]`, idle rows zeros. The
    current k (normed, rotated) and v are written to (slot, position). Idle rows read and write no cache.

    Flash decoding (arXiv 2311.01282 section 3) over the keys of earlier positions, which are read before the wait: rows.slots
    and rows.positions must be written by a kernel with a full edge after it, and a slot may have one row a step. The number of
    splits follows the length read on the device. The current key and value come from qkv, not through the cache.
    Bytes: K and V of every key seen, once; qkv, out and the partials stay in L2. Torch twin: rms_norm, rope_torch,
    cache_write_torch, attention_torch.
    """
    assert all(t.is_contiguous() for t in (k_cache, v_cache, qkv))
    group, d_pad = spec.heads // spec.kv_heads, triton.next_power_of_2(spec.head_dim)
    group_pow = triton.next_power_of_2(group) if tile.group else 1
    chunk = min(COMBINED_VALUES * tile.warps // (group_pow * d_pad), triton.next_power_of_2(scratch.splits))
    shape = {
        "WINDOW": spec.window or 0,
        "HEAD_NORM": spec.q_norm is not None,
        "K": spec.kv_heads,
        "GROUP": group,
        "D": spec.head_dim,
        "D_PAD": d_pad,
        "BLOCK": tile.block,
        "MIN_KEYS": tile.min_keys,
        "STAGES": tile.stages,
        "CHUNK": max(1, chunk),
        "PDL": pdl,
    }
    if tile.group:
        dot = dot_dtype(k_cache.dtype, interpreted)
        shape |= {"GROUP_PAD": max(16, group_pow), "GROUP_POW": group_pow, "DOT_DTYPE": dot}
    kernel = _group_attention_kernel if tile.group else _head_attention_kernel
    kernel[(len(qkv), spec.kv_heads if tile.group else spec.heads, scratch.splits)](
        qkv,
        k_cache,
        v_cache,
        out,
        spec.cos,
        spec.sin,
        spec.q_norm if spec.q_norm is not None else qkv,
        spec.k_norm if spec.k_norm is not None else qkv,
        rows.slots,
        rows.positions,
        scratch.partial,
        scratch.stats,
        scratch.counter,
        k_cache.shape[2],
        scratch.splits,
        spec.scale,
        spec.eps,
        **shape,
        **launch_options(tile.warps, tile.stages, pdl),
    )
    return out
