"""Weight files: what is on disk against what the index and the config say, tied embeddings, number types, hostile files."""

import json
import logging
import os
import struct
import time

import psutil
import pytest
import torch
from safetensors.torch import save_file

from models import find_model
from models.layout import LM_HEAD, allocate, pieces
from models.weights import WeightFiles
from runtime.errors import CheckpointError, QuartetError, UnsupportedModelError
from tests.checkpoints import edit_json, read_json, read_tensors, tiny, write_json
from tests.rule_n import assert_rule_n, judge, open_model, play, random_ids

EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def logits(path):
    return play(open_model(path), random_ids(12), prefill=8)


# What lies on disk


def test_shards_hold_the_same_model_as_one_file(tmp_path):
    assert torch.equal(logits(tiny(tmp_path / "one")), logits(tiny(tmp_path / "three", shards=3)))


def test_a_shard_that_is_gone_is_named(tmp_path):
    (tiny(tmp_path, shards=2) / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=SHARDS[1]):
        find_model(str(tmp_path))


def test_a_config_without_weights_is_refused(tmp_path):
    (tiny(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no weights: neither model\.safetensors nor"):
        find_model(str(tmp_path))
    assert find_model(str(tmp_path), weights=False).config.hidden_size == 256


def test_a_stray_file_beside_the_weights_changes_nothing(tmp_path):
    """A reader that takes every *.safetensors of the folder lets a leftover overwrite good weights."""
    path = tiny(tmp_path, shards=2)
    before = logits(path)
    save_file(
        {name: torch.zeros_like(tensor) for name, tensor in read_tensors(path).items()}, path / "consolidated.safetensors"
    )
    assert torch.equal(logits(path), before)


def test_an_index_wins_over_a_single_file_and_says_so(tmp_path, caplog):
    path = tiny(tmp_path, shards=2)
    before = logits(path)
    save_file({name: torch.zeros_like(tensor) for name, tensor in read_tensors(path).items()}, path / "model.safetensors")
    assert torch.equal(logits(path), before)
    assert "model.safetensors is ignored" in caplog.text


def test_an_index_entry_that_its_shard_does_not_hold_is_named(tmp_path):
    path = tiny(tmp_path, shards=2)
    index = read_json(path / INDEX)
    index["weight_map"]["model.norm.weight"] = SHARDS[0]
    write_json(path / INDEX, index)
    with pytest.raises(CheckpointError, match=rf"model\.norm\.weight into {SHARDS[0]}"):
        find_model(str(path))


def test_a_tensor_missing_from_the_index_is_named(tmp_path):
    path = tiny(tmp_path, shards=2)
    index = read_json(path / INDEX)
    del index["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    write_json(path / INDEX, index)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        find_model(str(path))


def test_a_tensor_that_nobody_uses_is_named_and_left_out(tmp_path, caplog):
    path = tiny(tmp_path / "extra", edit=lambda tensors: tensors.update({"model.layers.7.extra.weight": torch.ones(3)}))
    assert torch.equal(logits(path), logits(tiny(tmp_path / "plain")))
    assert "model.layers.7.extra.weight" in caplog.text


def test_old_rotary_buffers_are_left_out_in_silence(tmp_path, caplog):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    logits(tiny(tmp_path, edit=lambda tensors: tensors.update({name: torch.ones(16)})))
    assert caplog.text == ""


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    def cut(tensors):
        tensors["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(32, 256)

    tiny(tmp_path, edit=cut)
    with pytest.raises(CheckpointError, match=r"k_proj\.weight has shape \[32, 256\] and config\.json asks for \[64, 256\]"):
        find_model(str(tmp_path))


def test_many_missing_tensors_are_counted(tmp_path):
    tiny(tmp_path, edit=lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1" in name])
    with pytest.raises(CheckpointError, match="and 6 more are missing"):
        find_model(str(tmp_path))


def test_pickles_are_never_opened(tmp_path):
    """A FIFO blocks whoever opens it, so a reader that tries would hang here."""
    path = tiny(tmp_path)
    os.mkfifo(path / "pytorch_model.bin")
    logits(path)
    (path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is of a format that is never opened"):
        find_model(str(path))


# Tied embeddings


def test_tied_without_a_stored_head_uses_the_embedding(tmp_path):
    path = tiny(tmp_path, tie_word_embeddings=True)
    assert_rule_n(path)
    decoder = open_model(path)
    assert decoder.lm_head.weight is decoder.embedding


def test_tied_with_another_stored_head_keeps_both_as_transformers_does_and_says_so(tmp_path, caplog):
    path = tiny(tmp_path, tie_word_embeddings=True, store_lm_head=True)
    assert_rule_n(path)
    assert "tie_word_embeddings is true but lm_head.weight holds other values" in caplog.text
    assert not find_model(str(path)).config.tied


def test_tied_with_the_same_head_stored_is_tied(tmp_path, caplog):
    def same(tensors):
        tensors[LM_HEAD] = tensors[EMBEDDING].clone()

    path = tiny(tmp_path, tie_word_embeddings=True, store_lm_head=True, edit=same)
    assert find_model(str(path)).config.tied
    assert caplog.text == ""
    assert_rule_n(path)


@pytest.mark.parametrize(
    ("stored", "what"),
    [
        (lambda tensor: tensor.to(torch.int32), "model.embed_tokens.weight is stored as I32"),
        (lambda tensor: tensor[0, 0].clone(), r"model.embed_tokens.weight has shape \[\]"),
    ],
    ids=["I32", "scalar"],
)
def test_tied_with_two_tables_that_no_model_has_is_refused_by_name(tmp_path, stored, what):
    """They were held against each other first, which was a traceback."""

    def edit(tensors):
        tensors |= {name: stored(tensors[name]) for name in ("model.embed_tokens.weight", "lm_head.weight")}

    with pytest.raises(QuartetError, match=what):
        find_model(str(tiny(tmp_path, tie_word_embeddings=True, store_lm_head=True, edit=edit)))


def test_tied_with_only_the_head_stored_uses_it_for_both(tmp_path, caplog):
    def only_head(tensors):
        tensors[LM_HEAD] = tensors.pop(EMBEDDING)

    path = tiny(tmp_path, tie_word_embeddings=True, store_lm_head=True, edit=only_head)
    assert_rule_n(path)
    assert "lm_head.weight is used for both" in caplog.text


def test_untied_without_a_stored_head_is_refused(tmp_path):
    tiny(tmp_path, tie_word_embeddings=False, store_lm_head=False)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        find_model(str(tmp_path))


def test_no_word_of_tying_means_untied(tmp_path):
    assert_rule_n(tiny(tmp_path, drop=["tie_word_embeddings"], store_lm_head=True))


# Number types


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
def test_the_stored_type_is_kept_whatever_the_config_calls_it(tmp_path, dtype, key):
    changes = {} if key is None else {key: dtype}
    path = tiny(tmp_path, dtype=getattr(torch, dtype))
    edit_json(path / "config.json", drop=["dtype"])
    edit_json(path / "config.json", **changes)
    assert find_model(str(path)).config.dtype == dtype
    assert_rule_n(path)


def test_the_file_has_the_last_word_against_the_config(tmp_path, caplog):
    path = tiny(tmp_path)
    edit_json(path / "config.json", dtype="float16")
    assert find_model(str(path)).config.dtype == "bfloat16"
    assert "the config says float16 and the weights are bfloat16" in caplog.text
    assert_rule_n(path)


def test_norms_stored_in_float32_join_a_bfloat16_run(tmp_path):
    def widen(tensors):
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] = tensors[name].float()

    path = tiny(tmp_path, edit=widen)
    assert find_model(str(path)).config.dtype == "bfloat16"
    assert_rule_n(path)


def test_float64_is_read_as_float32(tmp_path):
    path = tiny(tmp_path, edit=lambda tensors: tensors.update({n: t.double() for n, t in tensors.items()}))
    assert find_model(str(path)).config.dtype == "float32"
    assert_rule_n(path)


def test_a_type_without_meaning_here_is_refused(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    tiny(tmp_path, edit=lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UnsupportedModelError, match=r"up_proj\.weight is stored as F8_E4M3"):
        find_model(str(tmp_path))


def test_another_dtype_may_be_asked_for(tmp_path):
    path = tiny(tmp_path)
    ids = random_ids(32)
    judge(path, play(open_model(path, torch.float32), ids, prefill=24), ids, torch.float32)


# Hostile files


def header(entries, size=0, extra=b""):
    """A safetensors file with this header and `size` zero bytes of data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size) + extra


def entry(dtype="F32", shape=(2,), begin=0, end=8):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


HOSTILE = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header length 2^63-1": struct.pack("<Q", 2**63 - 1) + b"{}",
    "header length 101 MiB": struct.pack("<Q", 101 << 20) + b"{}",
    "offsets past the end": header({"a": entry(end=8)}, size=4),
    "begin after end": header({"a": entry(begin=8, end=0)}, size=8),
    "two tensors on one range": header({"a": entry(), "b": entry()}, size=8),
    "a hole": header({"a": entry(), "b": entry(begin=16, end=24)}, size=24),
    "a shape past 64 bits": header({"a": entry(shape=(2**32, 2**32), end=0)}),
    "a shape of another size": header({"a": entry(shape=(3,))}, size=8),
    "an unknown dtype": header({"a": entry(dtype="Q99")}, size=8),
    "the same name twice": header(
        b'{"a":%b,"a":%b}' % tuple(json.dumps(e).encode() for e in (entry(), entry(begin=8, end=16))), size=16
    ),
    "trailing bytes": header({"a": entry()}, size=8, extra=bytes(64)),
    "no JSON": header(b"x" * 16),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_hostile_file_is_refused_by_name_soon_and_small(tmp_path, name, sharded):
    path = tiny(tmp_path, shards=2 if sharded else 1)
    file = path / (SHARDS[1] if sharded else "model.safetensors")
    file.write_bytes(HOSTILE[name])
    before, start = psutil.Process().memory_info().rss, time.monotonic()
    with pytest.raises(CheckpointError, match=file.name):
        find_model(str(path))
    assert time.monotonic() - start < 5
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_a_folder_in_the_place_of_the_weights_is_refused(tmp_path):
    (tiny(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match="is not a regular file"):
        find_model(str(tmp_path))


# Index entries that leave the folder


@pytest.mark.parametrize(
    "entry", ["../outside.safetensors", "sub/../../outside.safetensors", "{absolute}", "sub\\..\\x.safetensors"]
)
def test_an_index_entry_that_leaves_the_folder_is_refused_unopened(tmp_path, entry):
    """A FIFO lies outside: a reader that opened it would hang."""
    path = tiny(tmp_path / "model", shards=2)
    (path / "sub").mkdir()
    outside = tmp_path / "outside.safetensors"
    os.mkfifo(outside)
    entry = entry.format(absolute=outside)
    index = read_json(path / INDEX)
    index["weight_map"]["model.norm.weight"] = entry
    write_json(path / INDEX, index)
    with pytest.raises(CheckpointError, match="leaves the model folder") as caught:
        find_model(str(path))
    assert "model.norm.weight" in str(caught.value)
    assert repr(entry) in str(caught.value)


@pytest.mark.parametrize("entry", ["pytorch_model.bin", "", 5, None])
def test_an_index_entry_that_names_no_safetensors_file_is_refused(tmp_path, entry):
    path = tiny(tmp_path, shards=2)
    index = read_json(path / INDEX)
    index["weight_map"]["model.norm.weight"] = entry
    write_json(path / INDEX, index)
    with pytest.raises(CheckpointError, match=r"must name a \.safetensors file"):
        find_model(str(path))


def test_shards_that_are_links_as_in_the_hub_cache_are_read(tmp_path):
    path = tiny(tmp_path / "snapshots" / "abc", shards=2)
    before = logits(path)
    (tmp_path / "blobs").mkdir()
    for i, shard in enumerate(SHARDS):
        (path / shard).rename(tmp_path / "blobs" / str(i))
        (path / shard).symlink_to(f"../../blobs/{i}")
    assert torch.equal(logits(path), before)


def test_a_shard_may_lie_in_a_folder_within(tmp_path):
    path = tiny(tmp_path, shards=2)
    before = logits(path)
    (path / "sub").mkdir()
    (path / SHARDS[1]).rename(path / "sub" / SHARDS[1])
    index = read_json(path / INDEX)
    index["weight_map"] = {k: f"sub/{v}" if v == SHARDS[1] else v for k, v in index["weight_map"].items()}
    write_json(path / INDEX, index)
    assert torch.equal(logits(path), before)


# Odd folder names


def test_odd_folder_names_load_like_plain_ones(tmp_path, monkeypatch):
    before = logits(tiny(tmp_path / "plain"))
    path = tiny(tmp_path / "my model #1 (v1.0) é")
    (path / "old.safetensors").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in (str(path), f"{path}/", path.name, f"./{path.name}/", f"../{tmp_path.name}/{path.name}"):
        source = find_model(name)
        assert source.label == path.name
        assert torch.equal(logits(name), before)


def test_every_row_is_filled_exactly_once(tmp_path, monkeypatch):
    monkeypatch.setattr("models.weights.BUFFER_BYTES", 1 << 14)  # several runs of rows for each tensor
    path = tiny(tmp_path, "qwen3", attention_bias=True)
    told = []
    source = find_model(str(path))
    table = pieces(source.config)
    targets = {name: target.fill_(torch.nan) for name, target in allocate(table, torch.device("cpu"), torch.bfloat16).items()}
    WeightFiles.of_folder(path).copy_into(targets, table, told.append)
    assert sum(told) == sum(target.nbytes for target in targets.values())
    assert all(target.isfinite().all() for target in targets.values())
    decoder = open_model(path)
    stored = read_tensors(path)
    for i, layer in enumerate(decoder.layers):
        parts = [stored[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        assert torch.equal(layer.qkv_proj.weight, torch.cat(parts))
        parts = [stored[f"model.layers.{i}.self_attn.{p}_proj.bias"] for p in "qkv"]
        assert torch.equal(layer.qkv_proj.bias, torch.cat(parts))
        parts = [stored[f"model.layers.{i}.mlp.{p}_proj.weight"] for p in ("gate", "up")]
        assert torch.equal(layer.gate_up_proj.weight, torch.cat(parts))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_gets_the_same_weights(tmp_path, dtype):
    path = tiny(tmp_path, "qwen2", shards=3, vocab_size=40_000)  # the embedding takes more than one staging buffer
    ours, theirs = (open_model(path, dtype, device=device) for device in ("cpu", "cuda"))
    assert torch.equal(ours.embedding, theirs.embedding.cpu())
    assert torch.equal(ours.lm_head.weight, theirs.lm_head.weight.cpu())
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"):
            assert torch.equal(getattr(a, name).weight, getattr(b, name).weight.cpu())
        assert torch.equal(a.qkv_proj.bias, b.qkv_proj.bias.cpu())


def test_a_warning_is_given_once_for_a_load(tmp_path, caplog):
    path = tiny(tmp_path, edit=lambda tensors: tensors.update({"extra": torch.ones(3)}))
    with caplog.at_level(logging.WARNING):
        open_model(path)
    assert caplog.text.count("tensor extra is not part of the model") == 1
