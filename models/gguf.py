"""Owns GGUF files: what their metadata says in the words of a config.json, and their tensors dequantized.

Does not own the arithmetic of quantized blocks (the gguf package) or the tokenizer (gguf_tokenizer). Sources: ggml's gguf.md,
llama.cpp's convert_hf_to_gguf.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.config import ARCHITECTURES, ModelConfig
from models.fields import Fields, one_line
from models.layout import pieces
from models.stored import Entry
from models.weights import WeightFiles
from runtime.errors import CheckpointError, UnsupportedModelError

FAMILIES = ("llama", "qwen2", "qwen3")
"""Architectures that are read; "llama" is Mistral's too."""

PLAIN = ("F32", "F16", "BF16")
"""Types that are not quantized and keep a run's dtype. All others are widened to bfloat16."""


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

        class Reader(GGUFReader):  # type: ignore[misc]
            """Past the file's end it gives errors in place of nothing, of which a wrong count could ask for 2^64 times."""

            def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **named: Any) -> Any:
                found = super()._get(offset, dtype, count, *order, **named)
                if len(found) < count:
                    raise ValueError(f"it ends before what its byte {offset} tells of")
                return found

        self.path = path
        try:
            reader: Any = Reader(path)
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
            "architectures": [ARCHITECTURES[family]],
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
