"""Owns Hugging Face models, read by transformers from a folder or made around our own decoder's weights, and their logits.

transformers is imported only when a rival or a reference is wanted. Does not own how a rival plays (contenders).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.decoder import Decoder
from models.layout import EMBEDDING, LM_HEAD, part, pieces
from runtime.errors import ConfigError


def reference(ids: Sequence[int], path: Path | None, decoder: Decoder) -> tuple[Tensor, Tensor | None]:
    """Hugging Face's logits `[T, V]` float32 on the host, eager attention on the decoder's device, one model at a time.

    Args:
        path: the checkpoint's folder, which transformers reads itself; None (random weights) takes the decoder's weights, and
            so do weights of 8 or 4 bits, made dense.

    Returns:
        Those of a float32 run, and those of a run in the decoder's dtype; None in place of the second if that is float32.
    """

    own = decoder.weight_format == "bf16"

    @torch.inference_mode()
    def logits(dtype: torch.dtype) -> Tensor:
        made = read_folder(path, dtype, decoder.device) if path is not None and own else around(decoder, path, dtype, "eager")
        found: Tensor = made(input_ids=torch.tensor([ids], device=decoder.device), use_cache=False).logits[0]
        return found.float().cpu()

    return logits(torch.float32), None if decoder.dtype == torch.float32 else logits(decoder.dtype)


def read_folder(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The model in a folder as transformers reads it, on its own and from the same files; eager attention."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager", local_files_only=True)
    return hf.to(device).eval()


def around(decoder: Decoder, path: Path | None, dtype: torch.dtype, attention: str) -> Any:
    """A transformers model whose weights are the decoder's own tensors: no copy in the decoder's dtype, converted in another.

    Args:
        path: the folder that holds config.json; None builds the config from the decoder's.
        attention: "eager" or "sdpa".
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, local_files_only=True) if path is not None else _config(decoder.config)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    dense_of = {name: held if isinstance(held, torch.Tensor) else held.dense_torch() for name, held in decoder.weights.items()}
    state = {piece.source: part(dense_of, piece).to(dtype) for piece in pieces(decoder.config)}
    if decoder.config.tied:
        state[LM_HEAD] = state[EMBEDDING]
    hf.load_state_dict(state, assign=True)
    # Its frequencies are a buffer that no checkpoint holds, so they are still on "meta".
    hf.model.rotary_emb = type(hf.model.rotary_emb)(config=hf.config).to(decoder.device)
    return hf.eval()


def _config(config: ModelConfig) -> Any:
    """transformers' config of the same shapes, for models that have no folder.

    Raises:
        ConfigError: rope scaling whose spelling in transformers' config is not written here.
    """
    from transformers import AutoConfig

    rope: dict[str, Any] = {"rope_type": config.rope.type, "rope_theta": config.rope.theta}
    if config.rope.type == "llama3":
        rope["factor"] = config.rope.factor
        rope["low_freq_factor"], rope["high_freq_factor"] = config.rope.low_freq_factor, config.rope.high_freq_factor
        rope["original_max_position_embeddings"] = config.rope.original_max_position
    elif config.rope.type != "default" or config.rope.divisors:
        raise ConfigError(f"transformers with random weights has no rope type {config.rope.type} here; use the folder's own")
    # Families do not look at the fields that they have no use for.
    return AutoConfig.for_model(
        config.family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position or 1 << 20,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=rope,
        tie_word_embeddings=config.tied,
        attention_bias=config.qkv_bias,
        mlp_bias=config.mlp_bias,
        use_sliding_window=config.window is not None,
        sliding_window=config.window,
        max_window_layers=0,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    )
