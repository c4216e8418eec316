"""Owns the write of one step's k and v into the cache, one launch. Does not own the cache (kv_cache)."""

from torch import Tensor

from runtime.ops import Rows
from runtime.ops._triton import tl, triton


@triton.jit
def _cache_write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    positions_ptr,
    stride_slot,
    stride_head,
    K: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    position = tl.load(positions_ptr + row).to(tl.int64)
    d = tl.arange(0, D_PAD)
    mask = d < D
    source = (row * K + head) * D + d
    target = slot * stride_slot + head * stride_head + position * D + d
    tl.store(k_cache_ptr + target, tl.load(k_ptr + source, mask=mask), mask=mask)
    tl.store(v_cache_ptr + target, tl.load(v_ptr + source, mask=mask), mask=mask)


def cache_write(k: Tensor, v: Tensor, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> None:
    """Write k, v `[B, K, D]` to (slot, position) of the caches `[slots, K, S, D]`; an idle row writes nothing.

    Bytes: k and v read and written once.
    """
    batch, kv_heads, head_dim = k.shape
    _cache_write_kernel[(batch, kv_heads)](
        k,
        v,
        k_cache,
        v_cache,
        rows.slots,
        rows.positions,
        k_cache.stride(0),
        k_cache.stride(1),
        K=kv_heads,
        D=head_dim,
        D_PAD=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


def cache_write_torch(k: Tensor, v: Tensor, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> None:
    """The torch twin; it reads the slots on the host, so it serves the CPU and tests."""
    live = rows.slots >= 0
    slots, positions = rows.slots[live].long(), rows.positions[live].long()
    k_cache[slots, :, positions] = k[live]
    v_cache[slots, :, positions] = v[live]
