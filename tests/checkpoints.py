"""Makes the checkpoints and tokenizers that tests run on: random ones, and ones whose answer is known by construction.

`tiny` is random, `chain` always answers with next(last token), `fixed` has the same logits for any input. `tok_b` is a
byte-level tokenizer whose ids are byte values, `tok_s` a SentencePiece-like one. Each builder writes into a folder and returns
its path.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 344,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}

END = 256
"""`<|endoftext|>` of tok_b, where chains end."""

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny(
    path: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    seed: int = 0,
    drop: Sequence[str] = (),
    store_lm_head: bool | None = None,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    **config: Any,
) -> Path:
    """A random checkpoint of a family, sharp enough that a mistake in rope or mask moves the logits.

    Args:
        dtype: of every stored tensor; the config says the same.
        shards: files to spread the tensors over; above 1 an index is written.
        drop: config keys to leave out.
        store_lm_head: whether lm_head.weight is stored; None: unless the config ties it to the embedding.
        edit: changes the tensors before they are saved.
        config: keys of config.json that differ from TINY.
    """
    merged = {**TINY, "model_type": family, "architectures": [ARCHITECTURES[family]], "dtype": name_of(dtype), **config}
    for key in drop:
        del merged[key]
    tensors = {name: tensor.to(dtype) for name, tensor in random_weights(merged, seed).items()}
    if not (not merged.get("tie_word_embeddings", True) if store_lm_head is None else store_lm_head):
        del tensors["lm_head.weight"]
    if edit is not None:
        edit(tensors)
    return save(path, merged, tensors, shards)


def chain(
    path: Path,
    next: Mapping[int, int] | Callable[[int], int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shards: int = 1,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint whose next token depends on the last one alone: its logit is about 22.6, all others are 0.

    Args:
        next: the successor of an id; ids a mapping does not name go to END.
        config: keys of config.json that differ: vocab_size 320, eos_token_id END, max_position_embeddings 512.
    """
    known = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
    merged = _constructed(dtype, {**known, "vocab_size": 320, "eos_token_id": END, **config})
    vocab, hidden = merged["vocab_size"], merged["hidden_size"]
    tensors = _silent_weights(merged)
    tensors["model.embed_tokens.weight"] = torch.eye(vocab, hidden)
    lm_head = torch.zeros(vocab, hidden)
    for token in range(vocab):
        lm_head[next(token) if callable(next) else next.get(token, END), token] = 1
    tensors["lm_head.weight"] = lm_head
    return _save_constructed(path, merged, tensors, dtype, shards, edit)


def fixed(
    path: Path,
    values: Mapping[int, float],
    rest: float = 0.0,
    *,
    dtype: torch.dtype = torch.bfloat16,
    edit: Callable[[dict[str, Tensor]], None] | None = None,
    **config: Any,
) -> Path:
    """A checkpoint whose logits are `values` (and `rest` for other ids) whatever the input: exact where bfloat16 holds v / 16.

    In float32 they are 15.98 / 16 of that, because of the norm's epsilon.
    """
    known = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 1}
    merged = _constructed(dtype, {**known, "vocab_size": 320, "eos_token_id": END, **config})
    tensors = _silent_weights(merged)
    embedding = torch.zeros(merged["vocab_size"], merged["hidden_size"])
    embedding[:, 0] = 1
    tensors["model.embed_tokens.weight"] = embedding
    lm_head = torch.zeros_like(embedding)
    lm_head[:, 0] = rest / 16
    for token, value in values.items():
        lm_head[token, 0] = value / 16
    tensors["lm_head.weight"] = lm_head
    return _save_constructed(path, merged, tensors, dtype, 1, edit)


def tok_b(
    path: Path,
    *,
    chat_template: str | None = CHATML,
    eos_token: str = "<|endoftext|>",
    words: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A byte-level BPE without merges: ids are byte values; 256 `<|endoftext|>`, 257 `<|im_start|>`, 258 `<|im_end|>`.

    Args:
        words: further entries, ids from 259; they decode to their text, and encoding never makes them.
        config: further keys of tokenizer_config.json.
    """
    symbols = _byte_symbols()
    vocab = {symbols[byte]: byte for byte in range(256)}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab |= {special: 256 + i for i, special in enumerate(specials)}
    vocab |= {"".join(symbols[byte] for byte in word.encode()): 259 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    return _save_tokenizer(path, tokenizer, {"eos_token": eos_token, "chat_template": chat_template, **config})


def tok_s(
    path: Path,
    *,
    bos: bool = True,
    chat_template: str | None = None,
    words: Sequence[str] = (),
    **config: Any,
) -> Path:
    """A SentencePiece-like BPE with byte fallback: 0 `<unk>`, 1 `<s>`, 2 `</s>`, 3 to 258 bytes, 259 `▁`, then a b c ▁a ▁b ▁c.

    Args:
        bos: whether a post-processor puts id 1 in front.
        words: further entries, ids from 266, spelled with `▁` for a space; encoding never makes them.
        config: further keys of tokenizer_config.json.
    """
    specials = ["<unk>", "<s>", "</s>"]
    pieces = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "▁a", "▁b", "▁c", *words]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁", letter) for letter in "abc"]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _save_tokenizer(path, tokenizer, {**named, "chat_template": chat_template, **config})


def save(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], shards: int = 1) -> Path:
    """Write config.json and the tensors, spread over `shards` files with an index when there are several."""
    path.mkdir(parents=True, exist_ok=True)
    write_json(path / "config.json", config)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
        return path
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        held = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in held}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return path


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def read_json(path: Path) -> dict[str, Any]:
    """The object a JSON file holds."""
    data = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write an object as a JSON file."""
    path.write_text(json.dumps(data, indent=2), encoding="utf-8")


def edit_json(path: Path, drop: Sequence[str] = (), **changes: Any) -> None:
    """Change keys of a JSON file."""
    data = {**read_json(path), **changes}
    write_json(path, {key: value for key, value in data.items() if key not in drop})


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a config's checkpoint can hold, lm_head.weight always."""
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    qwen2 = config["model_type"] == "qwen2"
    bias = bool(config.get("attention_bias", False))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        linears = [
            ("self_attn.q_proj", heads * head_dim, hidden, bias or qwen2),
            ("self_attn.k_proj", kv_heads * head_dim, hidden, bias or qwen2),
            ("self_attn.v_proj", kv_heads * head_dim, hidden, bias or qwen2),
            ("self_attn.o_proj", hidden, heads * head_dim, bias),
            ("mlp.gate_proj", width, hidden, bool(config.get("mlp_bias"))),
            ("mlp.up_proj", width, hidden, bool(config.get("mlp_bias"))),
            ("mlp.down_proj", hidden, width, bool(config.get("mlp_bias"))),
        ]
        for name, rows, columns, has_bias in linears:
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        if config["model_type"] == "qwen3":
            norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        shapes |= {f"model.layers.{layer}.{name}.weight": (size,) for name, size in norms.items()}
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    """float32 weights: linears N(0, 1.5/sqrt(fan_in)), embeddings N(0, 1), norms U(0.5, 1.5), biases N(0, 0.5)."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        if name.endswith("bias"):
            tensors[name] = torch.randn(shape, generator=generator) * 0.5
        elif len(shape) == 1:
            tensors[name] = torch.rand(shape, generator=generator) + 0.5
        else:
            scale = 1.0 if "embed_tokens" in name else 1.5 / math.sqrt(shape[1])
            tensors[name] = torch.randn(shape, generator=generator) * scale
    return tensors


def _constructed(dtype: torch.dtype, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config of a checkpoint with a known answer."""
    base = {"model_type": "llama", "architectures": [ARCHITECTURES["llama"]], "dtype": name_of(dtype)}
    return {**TINY, "intermediate_size": 64, **base, **changes}


def _silent_weights(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Random weights whose attention and MLP add nothing to the residual."""
    tensors = random_weights(config, seed=0)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1)
    return tensors


def _save_constructed(
    path: Path,
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    shards: int,
    edit: Callable[[dict[str, Tensor]], None] | None,
) -> Path:
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    if edit is not None:
        edit(tensors)
    return save(path, config, tensors, shards)


def _save_tokenizer(path: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "model_max_length": 100_000}
    merged = {**base, **config}
    write_json(path / "tokenizer_config.json", {key: value for key, value in merged.items() if value is not None})
    return path


def _byte_symbols() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
