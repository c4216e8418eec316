"""Owns GGUF files: what their metadata says in the words of a config.json, their tensors dequantized, and their tokenizer.

Does not own the arithmetic of quantized blocks (the gguf package). Sources: ggml's gguf.md, llama.cpp's convert_hf_to_gguf.py.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from torch import Tensor

from models.config import ModelConfig
from models.fields import Fields, one_line
from models.layout import pieces
from models.weights import Entry, WeightFiles
from runtime.errors import CheckpointError, UnsupportedModelError

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Architectures that are read; "llama" is Mistral's too."""

CONTROL, USER_DEFINED = 3, 4
"""GGUF's types of a special token and of one that is always kept whole."""

PLAIN = ("F32", "F16", "BF16")
"""Types that are not quantized and keep a run's dtype. All others are widened to bfloat16."""

MARKS = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Tokens that tokenizer_config.json names, and GGUF's word for them."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_THREES, _ONES = _WORDS % r"\p{N}{1,3}", _WORDS % r"\p{N}"
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "smaug-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _ONES),
    "tekken": _CASED,
    **dict.fromkeys(("gpt-2", "smollm"), None),
}
"""How text is cut before merging, by the name of the pre-tokenizer; None: as GPT-2 does, for smollm with digits one by one."""


def open_gguf(path: Path) -> "GGUF":
    """The file at a path; the last one is kept, since a large vocabulary takes seconds to read. Raises as GGUF."""
    return _opened(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(path: Path, _changed: int) -> "GGUF":
    return GGUF(path)


class GGUF:
    """One .gguf file.

    Raises:
        CheckpointError: it is damaged or one part of several.
        UnsupportedModelError: a model that Quartet does not run.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            reader: Any = GGUFReader(path)
            self.fields: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        except Exception as error:  # whatever the reader trips over in a damaged file
            raise CheckpointError(f"{path} is damaged or no GGUF file: {type(error).__name__}: {one_line(error)}") from error
        if self.fields.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path} is one of several parts; join them with llama-gguf-split --merge")
        self.config = ModelConfig.from_fields(Fields(self.config_json(), str(path)))
        if (factors := self._tensors.get("rope_freqs.weight")) is not None:  # how Llama 3.1's scaling is stored
            divisors = tuple(map(float, factors.data))
            if len(divisors) != self.config.head_dim // 2 or not all(0 < divisor < 1e6 for divisor in divisors):
                raise CheckpointError(f"{path}: rope_freqs.weight does not hold {self.config.head_dim // 2} divisors")
            self.config = replace(self.config, rope=replace(self.config.rope, divisors=divisors))

    @property
    def end_ids(self) -> list[int]:
        """Ids that end an answer, as the file names them."""
        names = ("eos", "eot", "eom")
        return [token for name in names if type(token := self.fields.get(f"tokenizer.ggml.{name}_token_id")) is int]

    @property
    def quantized(self) -> list[str]:
        """The quantized types among its tensors."""
        return sorted({tensor.tensor_type.name for tensor in self._tensors.values()} - set(PLAIN))

    def weights(self) -> WeightFiles:
        """Its tensors under their Hugging Face names.

        Raises:
            CheckpointError: a tensor that the model does not have.
        """
        entries = dict(self._entries())
        stray = self._tensors.keys() - {entry.file.removeprefix(f"{self.path}: ") for entry in entries.values()}
        if stray - {"rope_freqs.weight"}:
            raise CheckpointError(f"{self.path}: the tensor {min(stray)} is not part of a {self.config.family} model")
        return WeightFiles(str(self.path), entries)

    def save_tokenizer(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json.

        Raises:
            UnsupportedModelError: a kind of tokenizer that is not rebuilt here.
            CheckpointError: its parts do not fit together.
        """
        known = {name.removeprefix("tokenizer.ggml."): value for name, value in self.fields.items()}
        kind, pre = known.get("model"), known.get("pre", "gpt-2")
        if kind not in ("llama", "gpt2") or (kind == "gpt2" and pre not in SPLITS):
            raise UnsupportedModelError(
                f"{self.path}: the tokenizer is {kind!r} with pre-tokenizer {pre!r}, which is not rebuilt from GGUF; "
                "use the model's safetensors checkpoint"
            )
        try:
            made = _byte_level(known, pre) if kind == "gpt2" else _sentence_pieces(known)
            names = known["tokens"]
            marks = {
                f"{key}_token": names[known[f"{name}_token_id"]] for key, name in MARKS.items() if f"{name}_token_id" in known
            }
            if known.get("add_bos_token", kind == "llama" or SPLITS.get(pre) is _THREES) and "bos_token" in marks:
                bos = marks["bos_token"]
                made.post_processor = processors.TemplateProcessing(
                    single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, known["bos_token_id"])]
                )
            for kinds, special in (((CONTROL,), True), ((USER_DEFINED,), False)):
                words = [name for name, kind in zip(names, known.get("token_type", ()), strict=False) if kind in kinds]
                made.add_tokens([AddedToken(word, special=special, normalized=False) for word in words])
        except Exception as error:  # the library raises no narrower class
            raise CheckpointError(
                f"{self.path}: the tokenizer cannot be rebuilt: {type(error).__name__}: {one_line(error)}"
            ) from error
        made.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **marks}
        settings["chat_template"] = self.fields.get("tokenizer.chat_template")
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")

    def _entries(self) -> Iterator[tuple[str, Entry]]:
        from gguf import MODEL_ARCH, get_tensor_name_map
        from gguf.quants import dequantize

        config = self.config
        names = get_tensor_name_map(MODEL_ARCH[config.family.upper()], config.num_layers)
        for piece in pieces(config):
            tensor = self._tensors.get(names.get_name(piece.source, try_suffixes=(".weight", ".bias")))
            if tensor is None:
                continue
            shape, kind = tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type
            try:
                dequantize(tensor.data[:1], kind)
            except NotImplementedError:
                raise UnsupportedModelError(f"{self.path}: {tensor.name} is stored as {kind.name}, which is not read") from None
            paired = config.family == "llama" and ("q_proj" in piece.source or "k_proj" in piece.source)
            order = _half_split(shape[0], config.head_dim) if paired and shape == piece.shape else None
            read = partial(_read, tensor.data, kind, order)
            dtype = kind.name if kind.name in PLAIN else "BF16"
            yield piece.source, Entry(f"{self.path}: {tensor.name}", shape, dtype, read)

    def config_json(self) -> dict[str, Any]:
        """The keys of a config.json."""
        family = self.fields.get("general.architecture")
        if family not in FAMILIES:
            raise UnsupportedModelError(
                f"{self.path}: the architecture is {family!r}; Quartet reads GGUF files of {', '.join(FAMILIES)}"
            )
        known = {name.removeprefix(f"{family}."): value for name, value in self.fields.items() if name.startswith(f"{family}.")}
        if "attention.sliding_window" in known:
            raise UnsupportedModelError(f"{self.path} has a sliding window, which is not read from GGUF; use its safetensors")
        epsilon = known.get("attention.layer_norm_rms_epsilon")
        table = self._tensors.get("token_embd.weight")
        return {
            "architectures": [FAMILIES[family]],
            "model_type": family,
            "dtype": "bfloat16",
            "vocab_size": None if table is None else int(table.shape[-1]),
            "hidden_size": known.get("embedding_length"),
            "intermediate_size": known.get("feed_forward_length"),
            "num_hidden_layers": known.get("block_count"),
            "num_attention_heads": known.get("attention.head_count"),
            "num_key_value_heads": known.get("attention.head_count_kv"),
            "head_dim": known.get("attention.key_length", known.get("rope.dimension_count")),
            "max_position_embeddings": known.get("context_length"),
            "rms_norm_eps": round(epsilon, 9) if isinstance(epsilon, float) else epsilon,  # stored as float32
            "rope_theta": known.get("rope.freq_base"),
            "rope_scaling": _rope_scaling(known),
            "num_experts": known.get("expert_count"),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.fields.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.fields.get("tokenizer.ggml.eos_token_id"),
        }


def _rope_scaling(known: dict[str, Any]) -> dict[str, Any] | None:
    """What the file says of stretched positions, as rope_scaling."""
    kind = known.get("rope.scaling.type", "linear" if "rope.scale_linear" in known else "none")
    names = {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {key: known.get(f"rope.scaling.{name}") for key, name in names.items()}
    found["factor"] = found["factor"] or known.get("rope.scale_linear")
    return None if kind == "none" else {"rope_type": kind, **found}


def _half_split(rows: int, head_dim: int) -> Any:
    """For each row of a Hugging Face q or k, pairs (i, i + D/2) of a head, the row of GGUF's, pairs (0, 1), (2, 3).."""
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _read(data: Any, kind: Any, order: Any, first: int, last: int, buffer: Tensor) -> Tensor:
    """Rows first to last in float32; see Entry.read."""
    from gguf.quants import dequantize

    return torch.from_numpy(
        np.array(dequantize(data[first:last] if order is None else data[order[first:last]], kind), np.float32)
    )


def _byte_level(known: dict[str, Any], pre: str) -> Tokenizer:
    """A byte-level BPE."""
    merges = [tuple(merge.split(" ")) for merge in known["merges"]]
    made = Tokenizer(
        BPE(
            vocab={name: i for i, name in enumerate(known["tokens"])},
            merges=merges,
            ignore_merges=SPLITS[pre] in (_THREES, _CASED),
        )
    )
    split, plain = SPLITS[pre], pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split is not None:
        cut = pre_tokenizers.Split(Regex(split), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), plain]) if pre == "smollm" else plain
    if SPLITS[pre] is _ONES:
        made.normalizer = normalizers.NFC()
    made.decoder = decoders.ByteLevel()
    return made


def _sentence_pieces(known: dict[str, Any]) -> Tokenizer:
    """Llama 2's: pieces with scores, from which the merges follow, and bytes for what is no piece."""
    names, scores = known["tokens"], known["scores"]
    vocab = {name: i for i, name in enumerate(names)}
    normal = [kind == 1 for kind in known.get("token_type", [1] * len(names))]
    pairs = [
        (-score, cut, name)
        for name, score, plain in zip(names, scores, normal, strict=True)
        for cut in range(1, len(name))
        if plain and name[:cut] in vocab and name[cut:] in vocab
    ]
    merges = [(name[:cut], name[cut:]) for _, cut, name in sorted(pairs)]
    unknown = names[known["unknown_token_id"]] if "unknown_token_id" in known else None
    made = Tokenizer(BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    space, prefix = normalizers.Replace(" ", "▁"), known.get("add_space_prefix", True)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space]) if prefix else space
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return made
