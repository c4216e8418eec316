"""Weights of 8 and 4 bits from dense and quantized checkpoints, against Hugging Face running the same values, dense.

Packers here are written from the formats' documentation; compressed-tensors' own is used where it is installed.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.hugging_face import around
from bench.rule_n import rule_n
from models import Tokenizer, find_model, load_model
from models.quantized import AWQ_ORDER, settle_weights
from runtime.errors import CheckpointError, ConfigError, UnsupportedModelError
from runtime.kv_cache import KVCache
from runtime.ops import lowbit
from runtime.ops.lowbit import quantize
from tests.checkpoints import edit_json, tiny
from tests.rule_n import play, random_ids

WIDTHS = {"intermediate_size": 384}
PROJECTIONS = tuple(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


def opened(path, weights="auto", dtype=torch.float32):
    source = find_model(str(path))
    chosen = source.config.weights if weights == "auto" else weights
    return load_model(source, torch.device("cpu"), dtype, 512, weights=chosen)


def agrees(decoder, count=40):
    """Our logits, prefill and decode, against Hugging Face around the decoder's own values made dense."""
    ids = random_ids(count)
    with torch.inference_mode():
        exact = around(decoder, None, torch.float32, "eager")(torch.tensor([ids])).logits[0].float()
    ours = play(decoder, ids, prefill=count - 8)
    if decoder.dtype == torch.float32:
        assert (ours - exact).abs().max() <= 1e-3
    else:
        with torch.inference_mode():
            same = around(decoder, None, decoder.dtype, "eager")(torch.tensor([ids])).logits[0].float()
        verdict = rule_n(ours, exact, same)
        assert verdict.passed, str(verdict)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_dense_checkpoint_quantized_at_load_agrees_with_hugging_face_on_the_same_values(tmp_path, weights, dtype):
    decoder = opened(tiny(tmp_path, **WIDTHS), weights, dtype)
    assert decoder.weight_format == weights
    assert decoder.weight_bytes == find_model(str(tmp_path)).config.weight_bytes(str(dtype).removeprefix("torch."), weights)
    agrees(decoder)


def codes_to_values(codes, scales, zeros, group):
    scales, zeros = (t.float().repeat_interleave(group, 1) for t in (scales, zeros))
    return (codes.float() - zeros) * scales


def pack_rows(codes):
    """uint8 `[n, k]` -> int32 `[n, k / 8]`, the first code in the lowest bits."""
    words = codes.view(len(codes), -1, 8).long() << torch.arange(0, 32, 4)
    words = words.sum(2)
    return torch.where(words > 2**31 - 1, words - 2**32, words).to(torch.int32)


def random_codes(shape, group):
    rows, width = shape
    codes = torch.randint(0, 16, shape).to(torch.uint8)
    scales = (torch.rand(rows, width // group) * 0.02 + 0.005).half()
    return codes, scales, torch.randint(1, 16, (rows, width // group)).to(torch.uint8)


def gptq(name, shape, group, zeros=None, order=None):
    """The tensors of AutoGPTQ's layout and the values they stand for."""
    codes, scales, own = random_codes(shape, group)
    tensors = {
        "qweight": pack_rows(codes).t().contiguous(),
        "qzeros": pack_rows((own - 1).t().contiguous()),
        "scales": scales.t().contiguous(),
        "g_idx": (torch.arange(shape[1]) // group).to(torch.int32) if order is None else order,
    }
    return {f"{name}.{part}": t for part, t in tensors.items()}, codes_to_values(codes, scales, own, group)


def awq(name, shape, group):
    """The tensors of AutoAWQ's GEMM layout and the values they stand for."""
    codes, scales, own = random_codes(shape, group)

    def pack(values):  # [n, out] -> [n, out / 8]
        return pack_rows(values.view(len(values), -1, 8)[:, :, list(AWQ_ORDER)].reshape(len(values), -1))

    tensors = {"qweight": pack(codes.t()), "qzeros": pack(own.t()), "scales": scales.t().contiguous()}
    return {f"{name}.{part}": t for part, t in tensors.items()}, codes_to_values(codes, scales, own, group)


def packed(name, shape, group):
    """The tensors of compressed-tensors' pack-quantized layout and the values they stand for."""
    codes, scales, _ = random_codes(shape, group)
    tensors = {"weight_packed": pack_rows(codes), "weight_scale": scales.bfloat16(), "weight_shape": torch.tensor(shape)}
    values = codes_to_values(codes, scales.bfloat16(), torch.full_like(scales, 8), group)
    return {f"{name}.{part}": t for part, t in tensors.items()}, values


def fp8(kind):
    def made(name, shape, group):
        rows, width = shape
        code = (torch.randn(shape) * 30).to(torch.float8_e4m3fn)
        sizes = {"tensor": (), "tensor1": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-width // 128))}
        scale = torch.rand(sizes[kind]) * 1e-3 + 1e-4
        full = (
            scale.reshape(1, 1).expand(shape)
            if kind.startswith("tensor")
            else scale.expand(shape)
            if kind == "channel"
            else None
        )
        if full is None:
            full = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :width]
        end = "weight_scale_inv" if kind == "block" else "weight_scale"
        return {f"{name}.weight": code, f"{name}.{end}": scale}, code.float() * full

    return made


def compressed(weights, format):
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
SCHEMES = {
    "fp8 tensor": (fp8("tensor"), 0, {"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "fp8 block": (fp8("block"), 128, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "compressed fp8 channel": (fp8("channel"), 0, compressed({**FLOAT8, "strategy": "channel"}, "float-quantized")),
    "compressed fp8 tensor": (fp8("tensor1"), 0, compressed({**FLOAT8, "strategy": "tensor"}, "float-quantized")),
    "compressed int4": (packed, 128, compressed({**INT4, "group_size": 128}, "pack-quantized")),
    "compressed int4 of 32": (packed, 32, compressed({**INT4, "group_size": 32}, "pack-quantized")),
    "gptq": (gptq, 128, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False}),
    "gptq of a whole row": (gptq, 0, {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}),
    "gptq of 64": (gptq, 64, {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False}),
    "awq": (awq, 128, {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}),
}


def quantized(path, scheme, **config):
    """A checkpoint of one scheme, and the value of each of its projections."""
    make, group, description = SCHEMES[scheme]
    values = {}

    def edit(tensors):
        for name in [name for name in tensors if name.endswith(PROJECTIONS)]:
            shape = tuple(tensors.pop(name).shape)
            made, values[name] = make(name.removesuffix(".weight"), shape, group or shape[1])
            tensors.update(made)

    tiny(path, **WIDTHS, quantization_config=description, edit=edit, **config)
    return values


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantized_checkpoint_is_read_code_by_code_and_agrees_with_hugging_face(tmp_path, scheme):
    torch.manual_seed(0)
    values = quantized(tmp_path, scheme)
    decoder = opened(tmp_path)
    layer = decoder.layers[1]
    q, gate = (values[f"model.layers.1.{name}.weight"] for name in ("self_attn.q_proj", "mlp.up_proj"))
    for weight, expected, rows in (
        (layer.qkv_proj.weight, q, slice(0, 256)),
        (layer.gate_up_proj.weight, gate, slice(384, 768)),
    ):
        assert weight.format == decoder.weight_format
        torch.testing.assert_close(weight.dense_torch()[rows], expected, rtol=1e-6, atol=0)
    assert decoder.weight_bytes == find_model(str(tmp_path)).config.weight_bytes("float32", decoder.weight_format)
    agrees(decoder)


def test_compressed_tensors_own_packer_gives_the_same_words():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers", reason="needs compressed-tensors")
    signed = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    assert torch.equal(helpers.pack_to_int32(signed, 4), pack_rows((signed + 8).to(torch.uint8)))


def test_in_features_in_an_order_of_their_own_are_refused(tmp_path):
    values = quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    assert values
    with pytest.raises(UnsupportedModelError, match=r"down_proj\.g_idx: .*desc_act"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("part", "value", "what"), [("weight_scale", math.nan, "weight_scale holds NaN"), ("weight", math.nan, "holds NaN")]
)
def test_nan_among_scales_or_codes_is_refused_by_name(tmp_path, part, value, what):
    quantized(tmp_path, "compressed fp8 channel")
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.self_attn.k_proj.{part}"
    tensors[name] = torch.full(tensors[name].shape, value).to(tensors[name].dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"layers\.1\.self_attn\.k_proj.*{what}"):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "part", "dtype", "what"),
    [
        ("awq", "qweight", torch.float32, "stored as F32; Quartet reads I32"),
        ("gptq", "qzeros", torch.int64, "stored as I64; Quartet reads I32"),
        ("compressed int4", "weight_scale", torch.float8_e4m3fn, "stored as F8_E4M3; Quartet reads BF16"),
        ("fp8 tensor", "weight", torch.int32, "stored as I32; Quartet reads F8_E4M3"),
    ],
)
def test_a_type_that_a_part_of_a_weight_does_not_have_is_refused_by_name(tmp_path, scheme, part, dtype, what):
    quantized(tmp_path, scheme)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.self_attn.k_proj.{part}"
    tensors[name] = tensors[name].float().to(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=rf"k_proj\.{part} is {what}"):
        find_model(str(tmp_path))


def test_an_empty_scale_is_told_as_such(tmp_path):
    quantized(tmp_path, "fp8 tensor")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight_scale"] = torch.empty(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"k_proj\.weight_scale has shape \[0\], which holds nothing"):
        opened(tmp_path)


def test_a_scale_beyond_the_dtype_it_is_kept_in_is_refused(tmp_path):
    """It became infinity, and the model's logits no numbers."""
    quantized(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.scales"
    tensors[name] = tensors[name].float()
    tensors[name][0, 0] = 1e6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"down_proj has a scale of 1e\+06, and scales are kept in float16"):
        opened(tmp_path)


def test_a_dense_weight_that_is_no_number_is_refused_by_name(tmp_path):
    def edit(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.inf

    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: NaN or infinity.*--weights bf16"):
        opened(tiny(tmp_path, **WIDTHS, edit=edit), "int4")


@pytest.mark.parametrize(
    ("config", "weights", "what"),
    [
        ({"hidden_size": 208, "intermediate_size": 384}, "int4", "208 in features, not a multiple of 32"),
        ({"intermediate_size": 344}, "int4", "344 rows"),
        ({"intermediate_size": 345}, "fp8", "345 in features, which pairs do not divide; use --weights bf16"),
        ({"hidden_size": 207}, "int4", "207 in features, .*use --weights bf16"),
    ],
)
def test_shapes_that_the_format_does_not_hold_are_refused_by_name(tmp_path, config, weights, what):
    with pytest.raises(UnsupportedModelError, match=what):
        opened(tiny(tmp_path, **config), weights)


@pytest.mark.parametrize("groups", [None, [1], {"a": None}, {"a": {"targets": ["Linear"], "weights": [1]}}], ids=str)
def test_config_groups_of_another_form_are_refused(tmp_path, groups):
    quantized(tmp_path, "compressed int4 of 32")
    edit_json(tmp_path / "config.json", quantization_config={**SCHEMES["compressed int4"][2], "config_groups": groups})
    with pytest.raises(UnsupportedModelError, match="quant_method 'compressed-tensors'"):
        find_model(str(tmp_path))


def test_a_group_size_may_be_a_whole_float_as_every_number_of_a_config(tmp_path):
    quantized(tmp_path, "gptq of 64")
    edit_json(tmp_path / "config.json", quantization_config={**SCHEMES["gptq of 64"][2], "group_size": 64.0})
    assert opened(tmp_path).layers[0].down_proj.weight.group == 64


def test_zeros_of_an_awq_checkpoint_are_read_whatever_zero_point_says(tmp_path):
    values = quantized(tmp_path, "awq")
    edit_json(tmp_path / "config.json", quantization_config={**SCHEMES["awq"][2], "zero_point": False})
    torch.testing.assert_close(
        opened(tmp_path).layers[0].down_proj.weight.dense_torch(), values["model.layers.0.mlp.down_proj.weight"]
    )


def test_rows_of_which_a_buffer_holds_no_block_of_16_are_quantized(tmp_path, monkeypatch):
    """Blocks were begun in their middle, an assertion: at 65,536 in features and more, stored in float32."""
    tiny(tmp_path, **WIDTHS, dtype=torch.float32)
    whole = opened(tmp_path, "int4").layers[0].down_proj.weight
    monkeypatch.setattr("models.weights.BUFFER_BYTES", 8 * 4 * 384)
    assert torch.equal(opened(tmp_path, "int4").layers[0].down_proj.weight.tiles, whole.tiles)


def test_another_format_than_a_quantized_checkpoint_has_is_refused(tmp_path):
    quantized(tmp_path, "awq")
    stored = find_model(str(tmp_path)).config.stored
    assert settle_weights("auto", stored) == "int4"
    with pytest.raises(ConfigError, match="weights fp8 was asked for and the checkpoint is stored in int4"):
        settle_weights("fp8", stored)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
def test_a_quantized_model_never_exists_dense_as_a_whole(tmp_path, weights, monkeypatch):
    """Dense are, beside what stays dense, one matrix of scratch and at most 1,024 rows in each of the reading threads."""
    tiny(tmp_path, **WIDTHS, num_hidden_layers=12, vocab_size=64)
    source, rounded = find_model(str(tmp_path)), []
    monkeypatch.setattr(lowbit, "quantize", lambda rows, *how: rounded.append(rows.nbytes) or quantize(rows, *how))
    monkeypatch.setattr(lowbit, "ROWS_AT_ONCE", 64)
    decoder = load_model(source, torch.device("cpu"), torch.bfloat16, 64, weights=weights)
    layer = decoder.layers[0]
    scratch = {each.qkv_proj.weight.scratch.data_ptr() for each in decoder.layers} | {layer.down_proj.weight.scratch.data_ptr()}
    widest = max(math.prod(linear.weight.shape) for linear in (layer.qkv_proj, layer.gate_up_proj, layer.down_proj))
    assert len(scratch) == 1
    assert layer.qkv_proj.weight.scratch.nbytes == 2 * widest
    assert max(rounded) == 64 * 384 * 2
    assert (
        decoder.weight_bytes == source.config.weight_bytes("bfloat16", weights) < source.config.weight_bytes("bfloat16") * 0.6
    )


@pytest.mark.model
def test_perplexity_of_the_demo_model_in_8_and_4_bits_stays_near_its_own():
    """A model of 135M parameters on 379 tokens of Alice in Wonderland (1865): 23.8 dense, 24.6 in FP8, 31.7 in INT4."""
    source = find_model("demo")
    ids = Tokenizer(source.path).encode((Path(__file__).parent.parent / "texts" / "alice.txt").read_text())
    found = {}
    for weights in ("bf16", "fp8", "int4"):
        decoder = load_model(source, torch.device("cpu"), torch.float32, 512, weights=weights)
        cache = KVCache.allocate(
            decoder.num_layers, 1, decoder.num_kv_heads, len(ids), decoder.head_dim, torch.float32, decoder.device
        )
        told = decoder.logits(decoder.prefill(torch.tensor(ids), 0, 0, cache)).log_softmax(-1)
        found[weights] = math.exp(-told[:-1].gather(1, torch.tensor(ids)[1:, None]).mean().item())
    print(found)
    assert found["fp8"] < 1.05 * found["bf16"]
    assert found["int4"] < 1.4 * found["bf16"]
