"""Owns the fused attention of one query head a block: multiply and add on vectors, the shortest chain of dependent steps.

Does not own the variant with a KV head's whole group of queries a block, nor the choice between them (fused_attention). Here
the K and V of a group are read once for each of its heads; all but the first reading come from L2.
"""

from runtime.ops._gemv import let_next_start, wait_for_previous
from runtime.ops._triton import tl, triton


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


@triton.jit(do_not_specialize=["capacity", "splits"])
def _head_attention_kernel(
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
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    MIN_KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0)
    query = tl.program_id(1)
    split = tl.program_id(2)
    head = query // GROUP
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row)
    d = tl.arange(0, D_PAD)
    d_mask = d < D
    half: tl.constexpr = D // 2
    other = tl.where(d < half, d + half, d - half)  # the rotation pairs i with i + D/2
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
    cos = tl.load(cos_ptr + angle, mask=d_mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=d_mask, other=0.0)
    sin = tl.where(d < half, -sin, sin)
    if HEAD_NORM:
        q_g = tl.load(q_norm_ptr + d, mask=d_mask, other=0.0).to(tl.float32)
        q_g_other = tl.load(q_norm_ptr + other, mask=d_mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    out_ptr += (row * K * GROUP + query) * D + d
    if slot < 0:
        tl.store(out_ptr, tl.zeros((D_PAD,), out_ptr.dtype.element_ty), mask=d < tl.where(split == 0, D, 0))
        return
    if split >= active:
        return

    # Prologue: norm and rotate q (and in split 0 the current k), straight from the projection's float32 sums.
    qkv_ptr += row * (K * GROUP + 2 * K) * D
    k_row = (K * GROUP + head) * D
    own = d < tl.where(split == 0, D, 0)
    q = tl.load(qkv_ptr + query * D + d, mask=d_mask, other=0.0)
    q_other = tl.load(qkv_ptr + query * D + other, mask=d_mask, other=0.0)
    k_now = tl.load(qkv_ptr + k_row + d, mask=own, other=0.0)
    k_other = tl.load(qkv_ptr + k_row + other, mask=own, other=0.0)
    v_now = tl.load(qkv_ptr + k_row + K * D + d, mask=own, other=0.0)
    if HEAD_NORM:
        k_g = tl.load(k_norm_ptr + d, mask=own, other=0.0).to(tl.float32)
        k_g_other = tl.load(k_norm_ptr + other, mask=own, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(q * q, 0) / D + eps)
        q, q_other = q * inverse * q_g, q_other * inverse * q_g_other
        inverse = tl.rsqrt(tl.sum(k_now * k_now, 0) / D + eps)
        k_now, k_other = k_now * inverse * k_g, k_other * inverse * k_g_other
    # Scores in base 2: exp2 is one instruction, and the factor rides on the scale.
    q = (q * cos + q_other * sin) * (scale * 1.4426950408889634)
    k_now = (k_now * cos + k_other * sin).to(k_ptr.dtype.element_ty)
    v_now = v_now.to(v_ptr.dtype.element_ty)
    writes = d < tl.where((split == 0) & (query % GROUP == 0), D, 0)
    now = position.to(tl.int64) * D + d
    tl.store(k_ptr + now, k_now, mask=writes)
    tl.store(v_ptr + now, v_now, mask=writes)

    # Online softmax; it begins with the current key in split 0 and with nothing in the others.
    top = tl.where(split == 0, tl.sum(q * k_now.to(tl.float32), 0), float("-inf"))
    total = tl.where(split == 0, 1.0, 0.0)
    acc = v_now.to(tl.float32)
    top, total, acc = _absorb_block(q, k, v, key, end, top, total, acc)
    for s in tl.range(start + BLOCK, end, BLOCK, num_stages=STAGES):
        key = s + tl.arange(0, BLOCK)
        offsets = key[:, None].to(tl.int64) * D + d[None, :]
        mask = (key[:, None] < end) & d_mask[None, :]
        k = tl.load(k_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        top, total, acc = _absorb_block(q, k, v, key, end, top, total, acc)

    if active == 1:
        tl.store(out_ptr, (acc / total).to(out_ptr.dtype.element_ty), mask=d_mask)
        return
    # The last split of a (row, head) to arrive sums the partials in split order: the bits do not depend on which it is.
    cell = row * K * GROUP + query
    partial_ptr += cell * splits * D_PAD
    stats_ptr += cell * splits * 2
    tl.store(partial_ptr + split * D_PAD + d, acc)
    tl.store(stats_ptr + split * 2, top)
    tl.store(stats_ptr + split * 2 + 1, total)
    tl.debug_barrier()  # Triton 3.6 lets the atomic overtake other warps' stores
    if tl.atomic_add(counter_ptr + cell, 1, sem="acq_rel") == active - 1:
        out = _combine_head(partial_ptr, stats_ptr, active, D_PAD, CHUNK)
        tl.store(out_ptr, out.to(out_ptr.dtype.element_ty), mask=d_mask)
        tl.store(counter_ptr + cell, 0)


@triton.jit
def _absorb_block(q, k, v, key, end, top, total, acc):
    """Take keys and values `[BLOCK, D_PAD]` into the running maximum, total (scalars) and weighted sum `[D_PAD]`."""
    scores = tl.sum(k.to(tl.float32) * q[None, :], 1)
    scores = tl.where(key < end, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 0))
    old = tl.exp2(top - new_top)
    p = tl.exp2(scores - new_top)
    total = total * old + tl.sum(p, 0)
    acc = acc * old + tl.sum(p[:, None] * v.to(tl.float32), 0)
    return new_top, total, acc


@triton.jit
def _combine_head(partial_ptr, stats_ptr, active, D_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """The output `[D_PAD]` from the partials of all splits, CHUNK at a time so that their loads are one round trip."""
    s = tl.arange(0, CHUNK)
    d = tl.arange(0, D_PAD)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((D_PAD,), tl.float32)
    for first in range(0, active, CHUNK):
        used = first + s < active
        parts = partial_ptr + (first + s[:, None]) * D_PAD + d[None, :]
        part = tl.load(parts, mask=used[:, None], other=0.0, cache_modifier=".cg")
        part_top = tl.load(stats_ptr + (first + s) * 2, mask=used, other=float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats_ptr + (first + s) * 2 + 1, mask=used, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(part_top, 0))
        old = tl.exp2(top - new_top)
        new = tl.exp2(part_top - new_top)
        total = total * old + tl.sum(part_total * new, 0)
        acc = acc * old + tl.sum(part * new[:, None], 0)
        top = new_top
    return acc / total
