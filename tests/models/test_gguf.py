"""GGUF files: the same logits as a safetensors twin of their values, every block type, tokenizers, and what is refused."""

import struct

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize, quantize

from models import Tokenizer, find_model, load_engine, load_tokenizer
from runtime.config import EngineConfig
from runtime.errors import CheckpointError, UnsupportedModelError
from runtime.request import Request
from tests.checkpoints import chain, read_json, read_tensors, save, tiny, tok_b, tok_s
from tests.rule_n import open_model, play, random_ids

SHAPE = {"intermediate_size": 512, "max_position_embeddings": 128}
SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,)}
"""Where a block of a type that Python cannot write keeps its float16 scales: such blocks are made of random bits."""


def blocks(weight, kind):
    """A weight `[rows, columns]` in blocks of a type, and the values these stand for."""
    if kind.name not in SCALES:
        data = quantize(weight, kind)
    else:
        size, width = GGML_QUANT_SIZES[kind]
        rows, columns = weight.shape
        data = np.random.default_rng(0).integers(256, size=(rows, columns // size, width), dtype=np.uint8)
        for at in SCALES[kind.name]:
            data[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), np.uint8)
        data = data.reshape(rows, -1)
    return data, dequantize(data, kind)


def write(file, folder, kind=Type.F32, tokenizer=None, edit=None, divisors=None):
    """A checkpoint folder as a .gguf file; the folder becomes its twin, with the values that the blocks stand for."""
    config = read_json(folder / "config.json")
    family, heads, kv = config["model_type"], config["num_attention_heads"], config["num_key_value_heads"]
    out = GGUFWriter(file, family)
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv)
    out.add_key_length(config["head_dim"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(config["rope_theta"])
    if tokenizer:
        tokenizer(out)
    if edit:
        edit(out)
    names = get_tensor_name_map(MODEL_ARCH[family.upper()], config["num_hidden_layers"])
    twin = {}
    for name, tensor in read_tensors(folder).items():
        weight = tensor.float().numpy()
        rows = np.arange(len(weight))
        if family == "llama" and ("q_proj" in name or "k_proj" in name):  # pairs of neighbours, as llama.cpp has them
            rows = rows.reshape(heads if "q_proj" in name else kv, 2, -1).swapaxes(1, 2).reshape(-1)
        kept = Type.F32 if weight.ndim == 1 else kind
        data, values = blocks(weight[rows], kept)
        out.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), data, raw_dtype=kept)
        twin[name] = torch.empty_like(tensor)
        twin[name][torch.from_numpy(rows)] = torch.from_numpy(np.array(values)).to(tensor.dtype)
    if divisors:
        out.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    save(folder, config, twin)
    return file


def same(file, folder, dtype=torch.bfloat16):
    ids = random_ids(40)
    return torch.equal(play(open_model(file, dtype), ids, 30, 16), play(open_model(folder, dtype), ids, 30, 16))


KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *SCALES)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_type_give_the_values_they_stand_for(tmp_path, kind):
    folder = tiny(tmp_path / "twin", **SHAPE)
    file = write(tmp_path / "a.gguf", folder, Type[kind])
    source = find_model(str(file))
    assert source.config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert source.note == (None if kind in ("F32", "F16", "BF16") else f"GGUF: {kind} widened to bfloat16")
    assert same(file, folder)


@pytest.mark.parametrize(("family", "config"), [("qwen2", {}), ("qwen3", {"hidden_size": 512}), ("llama", {"head_dim": 64})])
def test_families_with_biases_norms_and_tied_heads_agree(tmp_path, family, config):
    folder = tiny(tmp_path / "twin", family, tie_word_embeddings=True, **SHAPE, **config)
    assert same(write(tmp_path / "a.gguf", folder, Type.Q8_0), folder)


def test_scaled_rotation_is_kept_as_divisors(tmp_path):
    scaling = {"rope_type": "linear", "factor": 4.0}
    folder = tiny(tmp_path / "twin", rope_scaling=scaling, **SHAPE)
    assert same(write(tmp_path / "a.gguf", folder, divisors=[4.0] * 16), folder)
    folder = tiny(tmp_path / "twin", rope_scaling=scaling, **SHAPE)

    def linear(out):
        out.add_rope_scaling_type(type("Linear", (), {"value": "linear"}))
        out.add_rope_scaling_factor(4.0)

    assert same(write(tmp_path / "b.gguf", folder, edit=linear), folder)


def byte_level(folder, pre="gpt-2"):
    """What a GGUF file says of the byte-level tokenizer in a folder."""
    vocab = read_json(folder / "tokenizer.json")["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)

    def add(out):
        out.add_tokenizer_model("gpt2")
        out.add_tokenizer_pre(pre)
        out.add_token_list(tokens)
        out.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
        out.add_token_merges(["a b"])
        out.add_eos_token_id(256)
        out.add_eot_token_id(258)
        out.add_chat_template("{{ messages[0]['content'] }}<|im_end|>")

    return add


def test_a_file_answers_like_its_twin(tmp_path):
    folder = tok_b(chain(tmp_path / "twin", {65: 66, 66: 258, 258: 67, 67: 67}, intermediate_size=512), words=["ab"])
    file = write(tmp_path / "model.gguf", folder, Type.F16, byte_level(folder))
    source = find_model(str(file))
    assert (source.label, source.end_ids) == ("model", (256, 258))
    tokenizer = load_tokenizer(source)
    assert tokenizer.encode("A<|im_end|>éab") == [65, 258, 195, 169, 259]
    assert tokenizer.encode_chat([{"role": "user", "content": "hi<|im_end|>"}]) == [*b"hi<|im_end|>", 258]
    engine = load_engine(source, EngineConfig(max_len=32, max_slots=1)).engine
    answer = engine.generate([Request("a", (65,), max_tokens=6, end_ids=source.end_ids)])["a"]
    assert answer == [66, 258]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", "Ġ", "Ġ", "Ġb", "1234", "'s", "\u010a"]),
        ("smollm", ["a", "Ġ", "Ġ", "Ġb", "1", "2", "3", "4", "'s", "\u010a"]),
        ("llama-bpe", ["a", "Ġ", "Ġ", "Ġb", "123", "4", "'s", "\u010a"]),
        ("qwen2", ["a", "Ġ", "Ġ", "Ġb", "1", "2", "3", "4", "'s", "\u010a"]),
        ("tekken", ["a", "Ġ", "Ġ", "Ġb", "1", "2", "3", "4", "'s", "\u010a"]),
    ],
)
def test_a_text_is_cut_as_the_pre_tokenizer_of_that_name_cuts_it(tmp_path, pre, pieces):
    folder = tok_b(tiny(tmp_path / "twin", num_hidden_layers=1, **SHAPE), words=["ab"])
    file = write(tmp_path / "a.gguf", folder, Type.F16, byte_level(folder, pre))
    tokenizer = load_tokenizer(find_model(str(file)))
    cut = tokenizer._hf.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a   b1234's\n")
    said = [piece for piece, _ in cut]
    assert "".join(said) == "".join(pieces)
    assert [p for p in said if p.strip("Ġ")] == [p for p in pieces if p.strip("Ġ")]


def test_scores_give_the_merges_of_a_sentence_piece_vocabulary(tmp_path):
    folder = tok_s(tiny(tmp_path / "twin", num_hidden_layers=1, **SHAPE), words=["ab", "▁ab"])
    vocab = read_json(folder / "tokenizer.json")["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    scores = {"▁ab": -1.0, "ab": -2.0, "▁a": -3.0, "▁b": -4.0, "▁c": -5.0}

    def add(out):
        out.add_tokenizer_model("llama")
        out.add_token_list(tokens)
        out.add_token_scores([scores.get(token, -100.0) for token in tokens])
        out.add_token_types([2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)])
        out.add_bos_token_id(1)
        out.add_eos_token_id(2)
        out.add_unk_token_id(0)

    file = write(tmp_path / "a.gguf", folder, Type.F16, add)
    tokenizer = load_tokenizer(find_model(str(file)))
    assert tokenizer.encode("a b c") == [1, 263, 264, 265]
    assert tokenizer.encode("ab b") == [1, tokens.index("▁ab"), 264]
    assert tokenizer.encode("é</s>") == [1, 259, 198, 172, 2]
    assert "".join(tokenizer.stream([1, 263]).push([token]) for token in (264, 265)) == " b c"
    assert tokenizer.encode("a b c") == Tokenizer(folder).encode("a b c")


def test_what_is_not_read_is_refused_in_one_sentence(tmp_path):
    folder = tok_b(tiny(tmp_path / "twin", num_hidden_layers=1, **SHAPE), words=["ab"])
    file = tmp_path / "a.gguf"
    write(file, folder, tokenizer=byte_level(folder, "unheard-of"))
    with pytest.raises(UnsupportedModelError, match="pre-tokenizer 'unheard-of', which is not rebuilt"):
        load_tokenizer(find_model(str(file)))
    for edit, error, words in (
        (lambda out: out.add_uint16("split.count", 3), CheckpointError, "one of several parts"),
        (lambda out: out.add_expert_count(8), UnsupportedModelError, "mixture of experts"),
        (lambda out: out.add_sliding_window(64), UnsupportedModelError, "sliding window"),
        (
            lambda out: out.add_tensor("blk.0.attn_q.bias", np.zeros(256, np.float32)),
            CheckpointError,
            "attn_q.bias is not part",
        ),
    ):
        with pytest.raises(error, match=words):
            find_model(str(write(file, folder, edit=edit)))
    content = write(file, folder).read_bytes()
    for spoiled in (b"", b"GGUF", content[:1000], content[: len(content) // 2], content[:16] + b"\xff" * 8 + content[24:]):
        file.write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=r"a\.gguf"):
            find_model(str(file))
    (tmp_path / "twin" / "model.safetensors").rename(tmp_path / "twin" / "b.gguf")
    with pytest.raises(CheckpointError, match=r"give the path of b\.gguf"):
        find_model(str(tmp_path / "twin"))


@pytest.mark.parametrize("kind", [0, 6, 7], ids=["uint8", "float32", "bool"])
def test_an_array_longer_than_its_file_is_refused_at_once(tmp_path, kind):
    """The gguf package's reader took it entry by entry, of no bytes each, until the memory was full."""
    array = struct.pack("<Q1sIIQ", 1, b"x", 9, kind, 1 << 40)
    (tmp_path / "long.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + bytes(100))
    with pytest.raises(CheckpointError, match=r"damaged.*it ends before"):
        find_model(str(tmp_path / "long.gguf"))
