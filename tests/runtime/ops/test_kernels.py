"""Each Triton kernel against its torch twin, at tiny and odd shapes. Runs on a GPU, or in Triton's interpreter on the CPU
(TRITON_INTERPRET is read at import, so test_interpreter.py starts this file in a process of its own).
"""

import os
from dataclasses import replace

import pytest
import torch

from runtime.ops import Attention, Rows

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device, or TRITON_INTERPRET=1 (test_interpreter.py)"
)

# Kernel and twin both compute in float32 and round once, so they may differ by one unit in the last place of the largest
# value seen (the interpreter truncates to bfloat16 where the GPU rounds).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(TOLERANCE)
HEADS = [(1, 1), (7, 1), (6, 2), (8, 8), (8, 1)]
SIZES = [64, 80, 96, 128]


def close(ours, twin, scale=1.0):
    error = (ours.float() - twin.float()).abs().max().item() / max(twin.float().abs().max().item(), 1e-30)
    print(f"relative error {error:.2e}")
    assert error <= scale * TOLERANCE[ours.dtype]
    assert torch.isfinite(ours).all()


def random(*shape, dtype):
    return torch.randn(shape, dtype=torch.float32).to(DEVICE, dtype)


def spec(heads, kv_heads, head_dim, window=None, positions=512):
    angles = torch.outer(torch.arange(positions).double(), 10_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim).double())
    return Attention(
        heads, kv_heads, head_dim, 1e-5, angles.cos().float().to(DEVICE), angles.sin().float().to(DEVICE), window=window
    )


def rows(slots, positions):
    return Rows(
        torch.tensor(slots, dtype=torch.int32, device=DEVICE), torch.tensor(positions, dtype=torch.int32, device=DEVICE)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_rope_rotates_like_its_twin(dtype, heads, kv_heads):
    from runtime.ops.rope import rope, rope_torch

    for head_dim in SIZES:
        s, at = spec(heads, kv_heads, head_dim), rows([0, 1, 2], [0, 257, 511])
        q, k = random(3, heads, head_dim, dtype=dtype), random(3, kv_heads, head_dim, dtype=dtype)
        twins = [rope_torch(x, s.cos[at.positions], s.sin[at.positions]) for x in (q, k)]
        rope(q, k, s, at.positions)
        close(q, twins[0])
        close(k, twins[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_cache_write_touches_only_the_row_written(dtype):
    from runtime.ops.cache_write import cache_write, cache_write_torch

    for kv_heads, head_dim in ((1, 64), (3, 80), (8, 128)):
        k, v = random(3, kv_heads, head_dim, dtype=dtype), random(3, kv_heads, head_dim, dtype=dtype)
        caches = [torch.full((4, kv_heads, 9, head_dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(4)]
        at = rows([3, -1, 0], [8, 2, 0])
        cache_write(k, v, at, caches[0], caches[1])
        cache_write_torch(k, v, at, caches[2], caches[3])
        assert torch.equal(caches[0], caches[2])
        assert torch.equal(caches[1], caches[3])
        assert (caches[0][1:3] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_is_its_twin(dtype):
    from runtime.ops.silu_mul import silu_mul, silu_mul_torch

    for width in (1, 344, 1000, 1536, 4864):
        gate, up = 4 * random(2, width, dtype=dtype), random(2, width, dtype=dtype)
        twin = silu_mul_torch(gate, up)
        close(silu_mul(gate, up), twin)


def decoded(q, s, at, k, v, splits=None):
    from runtime.ops.attention import AttentionScratch, AttentionTile, decode_attention

    tile = AttentionTile(64, 64, 4, 3)
    scratch = AttentionScratch.make(len(q), s, DEVICE, replace(tile, blocks_per_sm=splits * s.kv_heads) if splits else tile)
    out = torch.empty(len(q), s.heads * s.head_dim, dtype=q.dtype, device=DEVICE)
    decode_attention(q, s, at, k, v, out, scratch, tile, interpreted=INTERPRETED)
    assert not scratch.counter.any()  # back at zero for the next launch
    return out


def attend(s, at, dtype, capacity=512, splits=None, slots=4, poison=True):
    """Kernel and twin over one random cache, poisoned with NaN past each row's length; both outputs."""
    from runtime.ops.attention import attention_torch

    k = random(slots, s.kv_heads, capacity, s.head_dim, dtype=dtype)
    v = random(slots, s.kv_heads, capacity, s.head_dim, dtype=dtype)
    if poison:
        for slot, position in zip(at.slots.tolist(), at.positions.tolist(), strict=True):
            k[slot, :, position + 1 :] = v[slot, :, position + 1 :] = float("nan")
    q = random(len(at.slots), s.heads, s.head_dim, dtype=dtype)
    twin, ours = attention_torch(q, s, at, k, v), decoded(q, s, at, k, v, splits)
    if not INTERPRETED:  # where blocks come in any order
        assert torch.equal(ours, decoded(q, s, at, k, v, splits))  # the same launch gives the same bits
    return ours, twin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_attention_is_its_twin_for_every_head_ratio_and_size(dtype, heads, kv_heads):
    turn = (DTYPES.index(dtype) + HEADS.index((heads, kv_heads))) % len(SIZES)
    for head_dim in SIZES[turn : turn + 1] if INTERPRETED else SIZES:  # the interpreter takes a second for each
        ours, twin = attend(spec(heads, kv_heads, head_dim), rows([2, 0], [200, 5]), dtype, capacity=256)
        close(ours, twin, scale=2)  # the probabilities are rounded to the dtype before they meet V


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511])
def test_attention_is_right_at_lengths_on_block_and_split_borders(length):
    ours, twin = attend(spec(4, 2, 64), rows([1], [length - 1]), torch.float32, splits=4)
    close(ours, twin)


@pytest.mark.parametrize("window", [1, 16, 63, 64, 65, 200])
def test_attention_sees_no_key_before_its_window(window):
    for position in (0, 62, 64, 199, 200, 300):
        ours, twin = attend(spec(4, 2, 64, window=window), rows([1], [position]), torch.float32, splits=4)
        close(ours, twin)


def test_an_idle_row_reads_no_cache_and_gives_zeros():
    ours, twin = attend(spec(4, 2, 64), rows([-1, 1, -1], [0, 100, 0]), torch.float32, poison=False)
    close(ours, twin)
    assert not ours[0].any()
    assert not ours[2].any()


def test_kv_heads_serve_the_query_heads_of_their_group():
    for heads, kv_heads in ((7, 1), (14, 2), (28, 4), (24, 8), (12, 2), (10, 2), (8, 8)):
        s, at = spec(heads, kv_heads, 64), rows([0], [40])
        k = random(1, kv_heads, 64, 64, dtype=torch.float32)
        v = torch.arange(kv_heads, device=DEVICE).float()[None, :, None, None].expand(1, kv_heads, 64, 64).contiguous()
        out = decoded(random(1, heads, 64, dtype=torch.float32), s, at, k, v)
        expected = torch.arange(heads, device=DEVICE) * kv_heads // heads
        assert torch.allclose(out.view(heads, 64), expected.float()[:, None].expand(heads, 64), atol=1e-5)
