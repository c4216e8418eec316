"""Each fused kernel against its operations played one by one in float32, at small and odd shapes and, on a GPU, at 7B models'.

Runs on a GPU, with PDL where it has it, or in Triton's interpreter on the CPU (test_interpreter.py starts this file in a
process of its own).
"""

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from models.random_weights import SHAPES
from runtime.ops import Attention, Linear, Rows, SlotState
from runtime.ops.attention import AttentionTile, attention_torch
from runtime.ops.cache_write import cache_write_torch
from runtime.ops.configs import Tile, multiplies
from runtime.ops.embed import embed_torch
from runtime.ops.fused import FusedOps
from runtime.ops.rope import rope_torch
from runtime.ops.sampler import SamplerScratch, sample_rows
from runtime.ops.silu_mul import silu_mul_torch
from runtime.ops.tuned import TileKey
from runtime.ops.unfused import UnfusedOps, rms_norm
from runtime.sampling import NOT_FINITE, draw_torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
PDL = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device, or TRITON_INTERPRET=1 (test_interpreter.py)"
)

# Largest error allowed, as a share of the largest value. float32: sums in another order, approximate exp2 and rsqrt. The other
# two: one rounding of the output and one on the way to it (of a factor of `tl.dot`, of the current k and v); the interpreter
# truncates to bfloat16 where a GPU rounds, an error of up to 2^-7 each time.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}
EPS = 1e-5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def close(ours, wanted, dtype):
    error = (ours.float() - wanted.float()).abs().max().item() / max(wanted.float().abs().max().item(), 1e-30)
    print(f"error {error:.1e} of the largest value")
    assert torch.isfinite(ours).all()
    assert error <= TOLERANCE[dtype]


def settle():
    """What a kernel reads before it waits must lie still: torch's own kernels are no part of the chain that waits."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def random(*shape, dtype, scale=1.0, near=0.0):
    return (near + scale * torch.randn(shape, device=DEVICE)).to(dtype)


def linear(n, width, dtype, bias=False):
    return Linear(random(n, width, dtype=dtype, scale=1.5 / width**0.5), random(n, dtype=dtype) if bias else None)


def weighted(x, by):
    """The projection in float32."""
    return F.linear(x.float(), by.weight.float(), by.bias.float() if by.bias is not None else None)


def normed(x, weight):
    return rms_norm(x.float(), weight.float(), EPS)


def attended(x, norm, qkv, spec, rows, k_cache, v_cache):
    """norm_qkv_rope and attention in float32; the caches are float32 too."""
    heads = weighted(normed(x, norm), qkv).view(len(x), -1, spec.head_dim)
    q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)
    if spec.q_norm is not None:
        q, k = normed(q, spec.q_norm), normed(k, spec.k_norm)
    cos, sin = spec.cos[rows.positions], spec.sin[rows.positions]
    q, k = rope_torch(q, cos, sin), rope_torch(k, cos, sin)
    cache_write_torch(k, v, rows, k_cache, v_cache)
    return attention_torch(q, spec, rows, k_cache, v_cache)


def fused(tiles=()):
    return FusedOps(PDL, INTERPRETED, dict(tiles))


def begun(ops, x, norm):
    """x as the launch before leaves it, its next norm begun: with a projection of zeros."""
    return ops.proj_residual(x.new_zeros(len(x), 16), Linear(x.new_zeros(x.shape[1], 16)), x, norm)


def check_gemvs(dtype, batch, c, f, v, bias=False, tiles=()):
    """`tiles`: by kernel, out and in features."""
    ops = fused((TileKey.of(kernel, batch, *sizes, dtype.itemsize), tile) for (kernel, *sizes), tile in dict(tiles).items())
    x, a, norm = random(batch, c, dtype=dtype), random(batch, f, dtype=dtype), random(c, dtype=dtype, scale=0.1, near=1)
    down, gate_up, head = linear(c, f, dtype, bias), linear(2 * f, c, dtype, bias), linear(v, c, dtype, bias)
    settle()
    out = ops.proj_residual(a, down, x, norm)
    once = x + weighted(a, down)
    first = out.clone()
    close(out, once, dtype)
    again = ops.proj_residual(a, down, out, norm)  # where a layer's second residual goes: not over what is being read
    assert again is not out
    close(again, first.float() + weighted(a, down), dtype)
    assert ops.proj_residual(a, down, x.clone(), norm).equal(first)  # counters are back at zero: the same launch, the same bits
    x = begun(ops, x, norm)
    close(ops.norm_gate_up(x, norm, gate_up, EPS), silu_mul_torch(*weighted(normed(x, norm), gate_up).chunk(2, -1)), dtype)
    logits = ops.norm_lm_head(x, norm, head, EPS)
    assert logits.dtype == torch.float32
    wanted = normed(x, norm)
    if batch > 1 or multiplies(dtype.itemsize, c):  # x * norm is rounded before the products of tensor cores
        made = ops._in_norm[2]
        begun_x = made.x[:batch].float() / made.scale
        close(begun_x, x.float() * norm.float(), dtype)
        wanted = begun_x * (x.float().square().mean(-1, keepdim=True) + EPS).rsqrt()
    close(logits, weighted(wanted, head), torch.float32)


def test_one_row_whose_widths_no_slice_divides():
    tiles = {
        ("proj_residual", 344, 592): Tile(16, 512, 4, 1),
        ("norm_gate_up", 592, 344): Tile(16, 128, 4, 2),
        ("norm_linear", 131, 344): Tile(16, 256, 4, 1),
    }
    check_gemvs(torch.bfloat16, 1, c=344, f=592, v=131, tiles=tiles)


@pytest.mark.parametrize(
    ("dtype", "c", "f", "bias"),
    [(torch.bfloat16, 256, 256, True), (torch.float16, 256, 72, False), (torch.bfloat16, 88, 256, False)],
)
def test_one_row_whose_widths_tensor_cores_take_both_or_one_of(dtype, c, f, bias):
    check_gemvs(dtype, 1, c=c, f=f, v=35, bias=bias)


@pytest.mark.parametrize("batch", [2, 16])
def test_a_batch_whose_widths_no_slice_divides(batch):
    check_gemvs(torch.bfloat16, batch, c=344, f=592, v=131)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_projections_of_every_dtype_with_biases(dtype, batch):
    check_gemvs(dtype, batch, c=36, f=50, v=17, bias=True)


def test_a_batch_whose_widths_a_slice_divides():
    check_gemvs(torch.bfloat16, 16, c=576, f=192, v=64)


@pytest.mark.parametrize(("batch", "slice", "splits"), [(5, 16, 4), (16, 32, 2)])
def test_a_batch_whose_splits_are_uneven(batch, slice, splits):
    tiles = {
        ("proj_residual", 50, 184): Tile(16, slice, 4, 2, splits),
        ("norm_gate_up", 184, 50): Tile(16, 32, 4, 2),
        ("norm_linear", 30, 50): Tile(16, 16, 4, 2, 3),  # whose logits are whole all the same
    }
    check_gemvs(torch.bfloat16, batch, c=50, f=184, v=30, bias=True, tiles=tiles)


def spec(heads, kv_heads, d, length, dtype, head_norm=False, window=None):
    angles = 3 * torch.randn(length, d // 2, device=DEVICE)
    norms = [random(d, dtype=dtype, scale=0.1, near=1) if head_norm else None for _ in range(2)]
    return Attention(heads, kv_heads, d, EPS, angles.cos(), angles.sin(), *norms, window)


def check_attention(dtype, shape, slots, positions, tile=None, bias=False, head_norm=False, window=None, c=48):
    """Output, caches and counters of norm_qkv_rope and attention. All of the cache that no row may read is NaN."""
    heads, kv_heads, d = shape
    length = max(positions) + 3
    s = spec(heads, kv_heads, d, length, dtype, head_norm, window)
    x, norm = random(len(slots), c, dtype=dtype), random(c, dtype=dtype, scale=0.1, near=1)
    qkv = linear((heads + 2 * kv_heads) * d, c, dtype, bias)
    k, v = (torch.full((max(slots) + 2, kv_heads, length, d), torch.nan, dtype=dtype, device=DEVICE) for _ in range(2))
    for slot, position in zip(slots, positions, strict=True):
        first = max(0, position + 1 - window) if window else 0
        if slot >= 0 and first < position:
            for cache in (k, v):
                cache[slot, :, first:position] = random(kv_heads, position - first, d, dtype=dtype)
    rows = Rows(*(torch.tensor(words, dtype=torch.int32, device=DEVICE) for words in (slots, positions)))
    k_wanted, v_wanted = k.float(), v.float()
    wanted = attended(x, norm, qkv, s, rows, k_wanted, v_wanted)
    few_blocks = TileKey.of("norm_linear", len(slots), len(qkv.weight), c, dtype.itemsize)
    own = TileKey.of("attention", len(slots), heads * d, kv_heads * d, dtype.itemsize)
    parts = 1 if len(slots) == 1 else c // 16  # of q, k and v, which attention adds
    ops = fused([(few_blocks, Tile(64, 16, 4, 1, parts)), *([] if tile is None else [(own, tile)])])
    settle()
    x = begun(ops, x, norm)
    out = ops.attention(ops.norm_qkv_rope(x, norm, qkv, s, rows, k, v), s, rows, k, v)
    first = out.clone()
    close(first, wanted, dtype)
    assert not first[rows.slots < 0].any()
    out.fill_(torch.nan)
    again = ops.attention(ops.norm_qkv_rope(x, norm, qkv, s, rows, k, v), s, rows, k, v)
    assert again.equal(first)  # counters are back at zero: the same launch, the same bits
    for ours, theirs in ((k, k_wanted), (v, v_wanted)):
        assert ours.isnan().equal(theirs.isnan())  # written where it should be and nowhere else
        close(ours.nan_to_num(), theirs.nan_to_num(), dtype)


TILE = AttentionTile(16, 16, 4)
MANY = dict(slots=[2, 0, -1, 3], positions=[70, 0, 1, 5])


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 2, 64), dict(dtype=torch.float32, head_norm=True, window=1)),
        ((3, 1, 80), dict(dtype=torch.bfloat16, head_norm=True, bias=True)),
        ((7, 1, 128), dict(dtype=torch.bfloat16, bias=True)),
        ((6, 2, 64), dict(dtype=torch.float16, window=24)),
    ],
    ids=str,
)
def test_attention_of_every_group_and_head_size(shape, options):
    check_attention(shape=shape, tile=TILE, **MANY, **options)


@pytest.mark.parametrize("window", [None, 33])
def test_attention_at_lengths_on_borders_of_blocks_splits_and_windows(window):
    positions = [0, 1, 15, 16, 17, 31, 32, 33, 48, 65]
    slots = list(reversed(range(len(positions))))
    tile = replace(TILE, blocks_per_sm=16)
    check_attention(torch.float32, (1, 1, 64), slots, positions, tile, window=window, c=16)


def test_one_long_row_in_more_splits_than_are_summed_at_once():
    check_attention(torch.bfloat16, (3, 1, 64), [0], [330], replace(TILE, blocks_per_sm=3))


@pytest.mark.parametrize(("shape", "batch"), [((4, 2, 128), 1), ((4, 2, 128), 2), ((2, 2, 128), 1)], ids=str)
def test_attention_in_the_tile_it_takes_by_itself(shape, batch):
    check_attention(torch.bfloat16, shape, [1, -1][:batch], [200, 9][:batch], head_norm=True)


def test_a_step_of_idle_rows_gives_zeros_and_touches_no_cache():
    check_attention(torch.bfloat16, (4, 2, 64), [-1, -1], [3, 3])


def sampling_state(vocab):
    """Eight slots: greedy, tiny and common temperatures, end ids, a limit and a first index for end ids."""
    state = SlotState.allocate(8, torch.device("cpu"))
    state.end_ids.fill_(-1)
    state.end_ids[:, 0] = torch.arange(8) * 3 % vocab
    state.end_ids[3, 1] = 5
    state.position.copy_(torch.arange(8) + 10)
    state.limit.fill_(1000)
    state.limit[5] = 16
    state.min_position[3] = 15
    state.seed.copy_(torch.randint(-(2**31), 2**31 - 1, (8, 2)))
    state.choice.copy_(torch.arange(8))
    state.temperature.copy_(torch.tensor([0.0, 1.0, 0.7, 1.5, 1e-4, 0.0, 2.0, 1.0]))
    moved = SlotState.allocate(8, DEVICE)
    moved.packed.copy_(state.packed)
    return moved


@pytest.mark.parametrize("vocab", [7, 1000, 2049])
def test_the_sampler_draws_and_advances_as_its_twin(vocab):
    slots = torch.tensor([3, -1, 0, 5, 1, 2, 4, 6, 7], dtype=torch.int32, device=DEVICE)
    state, twin = sampling_state(vocab), SlotState.allocate(8, DEVICE)
    logits = 3 * torch.randn(len(slots), vocab)
    logits[0, state.end_ids[3, 0].item()] = 50.0  # may not be drawn before index 15
    logits[2] = logits[4] = 1.25  # all tie
    logits[6, vocab // 2] = torch.nan
    logits[7, vocab - 1] = torch.inf
    logits[8] = -torch.inf
    logits = logits.to(DEVICE)
    scratch = SamplerScratch.make(len(slots), vocab, DEVICE)
    positions = torch.where(slots < 0, 0, state.position[slots.clamp(min=0).long()])
    for _ in range(2):
        rows = Rows(slots, positions)
        twin.packed.copy_(state.packed)
        settle()
        tokens = sample_rows(logits, rows, state, scratch, torch.empty_like(slots), PDL, INTERPRETED)
        wanted = draw_torch(logits, rows, twin, "plain")
        assert tokens[slots >= 0].equal(wanted[slots >= 0])
        assert state.packed.equal(twin.packed)
        assert (tokens[6:] == NOT_FINITE).all()
        assert tokens[2] == 0  # greedy, all tied
        assert not scratch.counter.any()
        positions = positions + 1
    assert state.done[[3, 5, 4, 6, 7]].all()  # an end id once it may stand, the limit, and what is not finite


@pytest.mark.parametrize("width", [64, 1100])
def test_embed_reads_each_slots_last_token_and_makes_idle_rows_of_done_slots(width):
    state = SlotState.allocate(4, DEVICE)
    state.token.copy_(torch.tensor([5, 6, 7, -1]))
    state.position.copy_(torch.tensor([50, 60, 70, 80]))
    state.done[3] = 1
    table = random(9, width, dtype=torch.bfloat16)
    slots = torch.tensor([2, 3, -1, 0, 1], dtype=torch.int32, device=DEVICE)
    x, rows = fused().embed(slots, state, table, table[0], Linear(table))
    wanted, twin = embed_torch(slots, state, table)
    assert x.equal(wanted)
    assert rows.slots.equal(twin.slots)
    assert rows.positions.equal(twin.positions)
    assert rows.slots.tolist() == [2, -1, -1, 0, 1]
    assert rows.positions.tolist() == [70, 0, 0, 50, 60]


def no_worse(name, ours, unfused, wanted):
    top = wanted.abs().max().item()
    errors = [(each.float() - wanted).abs().max().item() / top for each in (ours, unfused)]
    print(f"{name}: error {errors[0]:.1e}, unfused {errors[1]:.1e} of the largest value")
    assert torch.isfinite(ours).all()
    assert errors[0] <= 2 * errors[1] + 1e-3, name


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["llama-2-7b", "llama-3.1-8b", "qwen2.5-7b", "qwen3-8b"])
def test_a_layer_of_7b_models_errs_no_more_than_the_unfused_path(model):
    """Of what float32 makes of the same inputs."""
    config, dtype, length = replace(SHAPES[model], rms_norm_eps=EPS), torch.bfloat16, 1100
    c, f, heads, kv_heads, d = (
        *(config.hidden_size, config.intermediate_size),
        *(config.num_heads, config.num_kv_heads, config.head_dim),
    )
    s = spec(heads, kv_heads, d, length, dtype, config.qk_norm)
    qkv = linear((heads + 2 * kv_heads) * d, c, dtype, config.qkv_bias)
    o, gate_up, down, head = (
        linear(n, width, dtype) for n, width in ((c, heads * d), (2 * f, c), (c, f), (config.vocab_size, c))
    )
    norm, ops, unfused = random(c, dtype=dtype, scale=0.1, near=1), fused(), UnfusedOps()
    for batch in (1, 2, 3, 8, 16):
        x, a, h = random(batch, c, dtype=dtype), random(batch, heads * d, dtype=dtype), random(batch, f, dtype=dtype)
        slots = [-1 if row == 2 else batch - 1 - row for row in range(batch)]
        positions = [(1023 * (row + 1)) // batch for row in range(batch)]
        rows = Rows(*(torch.tensor(words, dtype=torch.int32, device=DEVICE) for words in (slots, positions)))
        caches = [random(batch, kv_heads, length, d, dtype=dtype) for _ in range(2)]
        for slot, position in zip(slots, positions, strict=True):
            for cache in caches if slot >= 0 else ():
                cache[slot, :, position:] = torch.nan
        wanted = attended(x, norm, qkv, s, rows, *(cache.float() for cache in caches))
        other = [cache.clone() for cache in caches]
        theirs = unfused.attention(unfused.norm_qkv_rope(x, norm, qkv, s, rows, *other), s, rows, *other)
        settle()
        x = begun(ops, x, norm)
        ours = ops.attention(ops.norm_qkv_rope(x, norm, qkv, s, rows, *caches), s, rows, *caches)
        no_worse(f"{model} batch {batch} attention", ours, theirs, wanted)
        for call, values, wanted in (
            ("proj_residual", (a, o, x, norm), x + weighted(a, o)),
            ("proj_residual", (h, down, x, norm), x + weighted(h, down)),
            ("norm_gate_up", (x, norm, gate_up, EPS), silu_mul_torch(*weighted(normed(x, norm), gate_up).chunk(2, -1))),
            ("norm_lm_head", (x, norm, head, EPS), weighted(normed(x, norm), head)),
        ):
            settle()
            if call.startswith("norm"):
                x.copy_(begun(ops, x.clone(), norm))
            no_worse(f"{model} batch {batch} {call}", getattr(ops, call)(*values), getattr(unfused, call)(*values), wanted)
