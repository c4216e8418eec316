"""Rule N for every family, head group, head width and odd width, at 1 to 16 rows of which some join and some leave."""

import pytest
import torch

from bench.hugging_face import reference
from bench.rule_n import rule_n
from models import Decoder, ModelConfig
from models.layout import allocate, pieces
from models.random_weights import fill_randomly
from models.rope import RopeConfig
from runtime.kv_cache import KVCache
from runtime.ops import SlotState, load_ops
from tests.rule_n import random_ids

LLAMA3 = RopeConfig("llama3", 500000.0, 8.0, 16, low_freq_factor=1.0, high_freq_factor=4.0)
VOCAB = 1000
SLOTS = 16
PREFILLED = 20
BATCHES = [batch for batch in (1, 2, 3, 8, 16, 8, 3, 2, 1) for _ in range(4)]


def shape(family, heads, kv_heads, d, hidden, width, **options):
    return ModelConfig(family, VOCAB, hidden, width, 2, heads, kv_heads, d, 512, 1e-5, **options)


def named(config):
    heads = f"{config.num_heads}x{config.num_kv_heads}x{config.head_dim}"
    return f"{config.family}-{heads}-{config.hidden_size}-{config.intermediate_size}"


SMALL = [
    shape("llama", 9, 3, 64, 576, 592),
    shape("qwen2", 14, 2, 64, 896, 344, qkv_bias=True),
    shape("qwen3", 8, 2, 96, 320, 592, qk_norm=True),
    shape("llama", 8, 1, 80, 488, 344, rope=LLAMA3),
]
"""Head groups of 3, 7, 4 and 8."""
LARGE = [
    shape("qwen2", 28, 4, 128, 3584, 18944, qkv_bias=True),
    shape("llama", 24, 8, 64, 1536, 11008, o_bias=True, qkv_bias=True, mlp_bias=True),
    shape("mistral", 12, 2, 128, 1536, 14336, window=24),
    shape("qwen3", 10, 2, 80, 640, 4864, qk_norm=True, tied=True),
    shape("llama", 8, 8, 96, 576, 1536, rope=LLAMA3),
    shape("qwen3", 4, 2, 128, 1024, 11008, qk_norm=True),
]
"""Head groups of 7, 3, 6, 5, 1 and 2."""


def play(decoder, ops, ids, fillers):
    """Logits of every row of every step, and for each the sequence (0 or 1) and position they belong to.

    Slot 0 plays `ids` in every step, in a row that changes; the other slots play `fillers`, each from a position of its own and
    only while the batch is large enough; some batches have an idle row. What no row may read is NaN.
    """
    device, total = decoder.device, len(ids)
    cache = KVCache(
        *(
            torch.full((decoder.num_layers, SLOTS, decoder.num_kv_heads, total, decoder.head_dim), torch.nan, device=device).to(
                decoder.dtype
            )
            for _ in range(2)
        )
    )
    state, position, logits, where = SlotState.allocate(SLOTS, device), [], [], []
    for slot in range(SLOTS):
        sequence, length = (ids, PREFILLED) if slot == 0 else (fillers, 3 * slot)
        decoder.prefill(torch.tensor(sequence[:length], device=device), 0, slot, cache)
        position.append(length)
    for step, batch in enumerate(BATCHES):
        slots = list(range(1, batch))
        slots.insert(step % batch, 0)
        if batch > 2 and step % 2:
            slots[-1 if slots[-1] else 0] = -1
        live = [slot for slot in slots if slot >= 0]
        state.position.copy_(torch.tensor(position))
        state.token.copy_(torch.tensor([(fillers if slot else ids)[position[slot]] for slot in range(SLOTS)]))
        out = decoder.decode(torch.tensor(slots, dtype=torch.int32, device=device), state, cache, ops)[1]
        logits.append(out[[row for row, slot in enumerate(slots) if slot >= 0]].cpu())
        for slot in live:
            where.append((min(slot, 1), position[slot]))
            position[slot] += 1
    return torch.cat(logits), where


@pytest.mark.parametrize(
    ("device", "config"),
    [
        *(("cpu", each) for each in SMALL),
        *(pytest.param("cuda", each, marks=pytest.mark.gpu) for each in [*SMALL, *LARGE]),
    ],
    ids=lambda value: value if isinstance(value, str) else named(value),
)
@torch.inference_mode()
def test_rows_that_join_and_leave_agree_with_hugging_face(device, config):
    table = pieces(config)
    weights = allocate(table, torch.device(device), torch.bfloat16)
    fill_randomly(weights, table, lambda done: None)
    total = 3 * SLOTS + len(BATCHES)
    decoder = Decoder(config, weights, total)
    sequences = [random_ids(total, VOCAB, seed) for seed in (1, 2)]
    references = [reference(ids, None, decoder) for ids in sequences]
    hopper = device == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
    for name in ("unfused", "fused") if device == "cuda" else ("unfused",):
        logits, where = play(decoder, load_ops(name, pdl=hopper), *sequences)
        exact, rounded = (torch.stack([references[which][kind][at] for which, at in where]) for kind in (0, 1))
        verdict = rule_n(logits, exact, rounded)
        print(f"{name}: {verdict}")
        assert verdict.passed, f"{name}: {verdict}"


@pytest.mark.parametrize(
    ("device", "name"),
    [("cpu", "unfused"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("unfused", "fused"))],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (14, 2), (28, 4), (24, 8), (12, 2), (10, 2), (8, 8), (8, 1)])
@torch.inference_mode()
def test_a_query_head_reads_the_kv_head_of_its_group(device, name, heads, kv_heads):
    """KV head g's values are all g: query head h must give floor(h * K / H), padding rows of a group nothing."""
    config, length, ops = shape("llama", heads, kv_heads, 64, 256, 344), 40, load_ops(name)
    table = pieces(config)
    weights = allocate(table, torch.device(device), torch.bfloat16)
    fill_randomly(weights, table, lambda done: None)
    layer, d = Decoder(config, weights, length).layers[0], 64
    layer.qkv_proj.weight[-kv_heads * d :] = 0  # the current token's value is 0
    for batch in (1, 8):
        k, v = (torch.randn(batch, kv_heads, length, d, device=device).to(torch.bfloat16) for _ in range(2))
        v[:] = torch.arange(kv_heads, device=device)[:, None, None]
        state = SlotState.allocate(batch, torch.device(device))
        state.position.fill_(length - 1)
        nothing = torch.zeros(1, 256, dtype=torch.bfloat16, device=device)  # q and k are 0: every key weighs the same
        slots = torch.arange(batch, dtype=torch.int32, device=device)
        x, rows = ops.embed(slots, state, nothing, layer.input_layernorm, layer.qkv_proj)
        q = ops.norm_qkv_rope(x, layer.input_layernorm, layer.qkv_proj, layer.attention, rows, k, v)
        out = ops.attention(q, layer.attention, rows, k, v).view(batch, heads, d).float().cpu()
        group = torch.arange(heads).mul(kv_heads).div(heads, rounding_mode="floor") * (length - 1) / length
        torch.testing.assert_close(out, group[None, :, None].expand_as(out), rtol=2**-7, atol=1e-3)
