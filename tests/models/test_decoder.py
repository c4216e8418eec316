"""The decoder against Hugging Face by rule N: families and their flags, chunk borders, lengths, windows."""

import pytest
import torch

from bench.rule_n import rule_n
from models.decoder import prefill_attention
from tests.checkpoints import tiny
from tests.rule_n import assert_rule_n, hugging_face, moved, open_model, play, random_ids

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_agrees_with_hugging_face(tmp_path, family, dtype):
    assert_rule_n(tiny(tmp_path, family, dtype=dtype))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True, "attention_bias": True}),
        ("llama", {"num_key_value_heads": 8}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": None}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("llama", {"hidden_size": 160}),
        ("qwen3", {"hidden_size": 160}),
        ("llama", {"hidden_size": 160, "head_dim": None}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 224}),
        ("llama", {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 80, "hidden_size": 384}),
        ("qwen2", {"num_attention_heads": 14, "head_dim": 64, "hidden_size": 896, "intermediate_size": 592}),
    ],
    ids=str,
)
def test_flags_and_odd_shapes_agree_with_hugging_face(tmp_path, family, config):
    assert_rule_n(tiny(tmp_path, family, **config))


@pytest.mark.parametrize(
    "config",
    [
        *(
            {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": 32 * heads}
            for heads, kv in ((7, 1), (14, 2), (28, 4), (24, 8), (12, 2), (10, 2), (8, 8), (8, 1))
        ),
        *({"head_dim": head_dim} for head_dim in (64, 80, 96, 128)),
        *({"hidden_size": hidden} for hidden in (896, 3584)),
        *({"hidden_size": 64, "intermediate_size": width} for width in (592, 4864, 11008, 14336, 18944)),
    ],
    ids=str,
)
def test_head_ratios_and_widths_that_are_no_powers_of_two_agree(tmp_path, config):
    """Kernels and views built on powers of two read or write the next group."""
    assert_rule_n(tiny(tmp_path, num_hidden_layers=1, **config), count=40, prefill=30)


def test_the_last_position_of_the_context_agrees(tmp_path):
    """A table or a mask that ends one position early."""
    assert_rule_n(tiny(tmp_path, max_position_embeddings=64), count=64, prefill=60)


def test_an_absent_head_dim_is_hidden_size_over_heads(tmp_path):
    path = tiny(tmp_path, drop=["head_dim", "num_key_value_heads"], hidden_size=160)
    assert open_model(path).head_dim == 20
    assert_rule_n(path)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33, 64, 100])
def test_a_prompt_may_be_cut_into_chunks_of_any_size(tmp_path, chunk):
    assert_rule_n(tiny(tmp_path), count=104, prefill=100, chunk=chunk)


@pytest.mark.parametrize(
    ("device", "ops"),
    [("cpu", "unfused"), *(pytest.param("cuda", ops, marks=pytest.mark.gpu) for ops in ("unfused", "fused"))],
)
def test_lengths_at_block_borders_agree_in_prefill_and_three_decode_steps(tmp_path, device, ops):
    """Length 1, a multiple of a block and one more gave NaN or a wrong last row."""
    path = tiny(tmp_path, max_position_embeddings=1024)
    ids = random_ids(514)
    decoder = open_model(path, max_len=514, device=device)
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 511)
    rows: list[int] = []
    ours = []
    for length in lengths:
        logits = play(decoder, ids[: length + 3], prefill=length, ops=ops)[-4:]
        assert logits.isfinite().all()
        rows += list(range(length - 1, length + 3))
        ours.append(logits)
    verdict = rule_n(
        torch.cat(ours), hugging_face(path, ids, torch.float32)[rows], hugging_face(path, ids, torch.bfloat16)[rows]
    )
    assert verdict.passed, verdict


@pytest.mark.parametrize("window", [1, 8, 16, 40])
def test_a_sliding_window_hides_older_keys(tmp_path, window):
    path = tiny(tmp_path / "windowed", "mistral", sliding_window=window)
    verdict = assert_rule_n(path, count=72, prefill=60, chunk=25)
    mistaken = tiny(tmp_path / "without", "mistral", sliding_window=None)
    assert moved(path, mistaken, random_ids(72)) > 20 * verdict.e0


def test_mistral_without_the_key_has_the_window_of_4096_that_transformers_gives_it(tmp_path):
    assert open_model(tiny(tmp_path, "mistral"), max_len=8).config.window == 4096


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows_every_layer_or_none(tmp_path, family):
    on = {"use_sliding_window": True, "sliding_window": 8}
    assert_rule_n(tiny(tmp_path / "all", family, max_window_layers=0, **on))
    assert_rule_n(tiny(tmp_path / "none", family, max_window_layers=2, **on))
    assert_rule_n(tiny(tmp_path / "off", family, use_sliding_window=False, sliding_window=8))


@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize(("length", "total"), [(1, 1), (9, 9), (1, 20), (7, 20), (20, 21)])
def test_prefill_attention_aligns_queries_to_the_last_keys(length, total, window):
    torch.manual_seed(0)
    q, k, v = torch.randn(length, 4, 16), torch.randn(2, total, 16), torch.randn(2, total, 16)
    want = torch.empty(length, 4, 16)
    for t in range(length):
        end = total - length + t + 1
        first = 0 if window is None else max(0, end - window)
        for head in range(4):
            keys, values = k[head // 2, first:end], v[head // 2, first:end]
            want[t, head] = torch.softmax(q[t, head] @ keys.T / 4, dim=-1) @ values
    torch.testing.assert_close(prefill_attention(q, k, v, window), want.view(length, 64), atol=1e-5, rtol=1e-5)


def test_kv_heads_serve_consecutive_query_heads():
    k, v = torch.randn(3, 5, 8), torch.arange(3.0)[:, None, None].expand(3, 5, 8).contiguous()
    out = prefill_attention(torch.randn(5, 12, 8), k, v, None).view(5, 12, 8)
    torch.testing.assert_close(out[..., 0], torch.arange(12).div(4, rounding_mode="floor").float().expand(5, 12))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("family", "config"),
    [("llama", {}), ("mistral", {"sliding_window": 16}), ("qwen2", {}), ("qwen3", {"head_dim": 80})],
    ids=str,
)
def test_every_family_agrees_on_a_gpu(tmp_path, family, config, dtype):
    path = tiny(tmp_path, family, dtype=dtype, **config)
    for chunk in (512, 25):
        assert_rule_n(path, count=90, prefill=80, chunk=chunk, device="cuda")


def test_a_float16_run_of_float16_weights_agrees(tmp_path):
    assert_rule_n(tiny(tmp_path, dtype=torch.float16))
