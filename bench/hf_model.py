"""Owns the making of Hugging Face models: from a folder, read by transformers itself, or around the weights of our own decoder.

Does not own what is asked of them (reference, hf_run). transformers is imported only when a rival or a reference is wanted.
"""

import importlib.util
import inspect
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.layout import EMBEDDING, LM_HEAD, NORM, part, pieces
from runtime.errors import ConfigError

Attention = Literal["eager", "sdpa"]


def require_transformers() -> None:
    """Raises ConfigError where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError("--against transformers needs transformers, which is not installed; `pip install transformers`")


def read_folder(path: Path, dtype: torch.dtype, device: torch.device, attention: Attention) -> Any:
    """The model in a folder as transformers reads it, on its own and from the same files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=attention, local_files_only=True)
    return hf.to(device).eval()


def around(decoder: Decoder, path: Path | None, dtype: torch.dtype, attention: Attention) -> Any:
    """A transformers model whose weights are the decoder's own tensors: no copy in the decoder's dtype, converted in another.

    Args:
        path: the folder that holds config.json; None builds the config from the decoder's.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True) if path is not None else hf_config(decoder.config)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    state = {name: tensor.to(dtype) for name, tensor in named_weights(decoder).items()}
    if decoder.config.tied:
        state[LM_HEAD] = state[EMBEDDING]
    hf.load_state_dict(state, assign=True)
    # Its frequencies are a buffer that no checkpoint holds, so they are still on "meta".
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config=hf.config).to(decoder.device)
    return hf.eval()


def named_weights(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's tensors by the names a checkpoint gives them; parts of merged weights are views."""
    targets = {EMBEDDING: decoder.embedding, NORM: decoder.norm, LM_HEAD: decoder.lm_head.weight}
    for i, layer in enumerate(decoder.layers):
        prefix = f"model.layers.{i}."
        attention = layer.attention
        for name, tensor in (
            ("input_layernorm", layer.input_layernorm),
            ("post_attention_layernorm", layer.post_attention_layernorm),
            ("self_attn.q_norm", attention.q_norm),
            ("self_attn.k_norm", attention.k_norm),
        ):
            if tensor is not None:
                targets[f"{prefix}{name}.weight"] = tensor
        for name, linear in (
            ("self_attn.qkv_proj", layer.qkv_proj),
            ("self_attn.o_proj", layer.o_proj),
            ("mlp.gate_up_proj", layer.gate_up_proj),
            ("mlp.down_proj", layer.down_proj),
        ):
            targets[f"{prefix}{name}.weight"] = linear.weight
            if linear.bias is not None:
                targets[f"{prefix}{name}.bias"] = linear.bias
    return {piece.source: part(targets, piece) for piece in pieces(decoder.config)}


def hf_config(config: ModelConfig) -> Any:
    """transformers' config of the same shapes, for models that have no folder.

    Raises:
        ConfigError: rope scaling whose spelling in transformers' config is not written here.
    """
    import transformers

    rope: dict[str, Any] = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}
    if config.rope.type == "llama3":
        rope["factor"] = config.rope.factor
        rope["low_freq_factor"], rope["high_freq_factor"] = config.rope.low_freq_factor, config.rope.high_freq_factor
        rope["original_max_position_embeddings"] = config.rope.original_max_position
    elif config.rope.type != "default":
        raise ConfigError(
            f"random weights in transformers with rope type {config.rope.type} are not built; use the folder's own"
        )
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position or 1 << 20,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": config.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if config.family == "llama":
        return transformers.LlamaConfig(**fields, attention_bias=config.qkv_bias, mlp_bias=config.mlp_bias)
    if config.family == "mistral":
        return transformers.MistralConfig(**fields, sliding_window=config.window)
    windowed = {"use_sliding_window": config.window is not None, "sliding_window": config.window, "max_window_layers": 0}
    if config.family == "qwen2":
        return transformers.Qwen2Config(**fields, **windowed)
    return transformers.Qwen3Config(**fields, **windowed, attention_bias=config.qkv_bias)


def cache_argument(hf: Any) -> str:
    """What this version's forward calls its KV cache. It takes any keyword, so a wrong name would quietly mean no cache."""
    known = inspect.signature(type(hf).forward).parameters
    return "cache" if "cache" in known else "past_key_values"
