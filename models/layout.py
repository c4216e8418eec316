"""Owns the table from a checkpoint's tensors to the decoder's: which rows of which weight each one fills.

Merged weights (q|k|v and gate|up) are made once and filled piece by piece; the unfused path reads its parts as views. Does not
own reading (weights), making (random_weights) or the decoder.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.config import ModelConfig
from runtime.errors import OutOfMemoryError

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
NORM = "model.norm.weight"


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint and where it goes: rows `row` to `row + shape[0]` of the decoder's `target`."""

    source: str
    shape: tuple[int, ...]
    target: str
    row: int = 0


def pieces(config: ModelConfig) -> list[Piece]:
    """Every tensor the decoder is made of, in the order of a step. Each row of each target is filled exactly once."""
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table: list[Piece] = []

    def add(name: str, *shape: int) -> None:
        table.append(Piece(name, shape, name))

    def linear(target: str, parts: dict[str, int], columns: int, bias: bool) -> None:
        row = 0
        for name, rows in parts.items():
            table.append(Piece(f"{prefix}{name}.weight", (rows, columns), f"{prefix}{target}.weight", row))
            if bias:
                table.append(Piece(f"{prefix}{name}.bias", (rows,), f"{prefix}{target}.bias", row))
            row += rows

    add(EMBEDDING, config.vocab_size, hidden)
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        add(f"{prefix}input_layernorm.weight", hidden)
        qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
        gate_up = {"mlp.gate_proj": width, "mlp.up_proj": width}
        if config.merged:
            qkv, gate_up = {"self_attn.qkv_proj": q + 2 * kv}, {"mlp.gate_up_proj": 2 * width}
        linear("self_attn.qkv_proj", qkv, hidden, config.qkv_bias)
        if config.qk_norm:
            add(f"{prefix}self_attn.q_norm.weight", config.head_dim)
            add(f"{prefix}self_attn.k_norm.weight", config.head_dim)
        linear("self_attn.o_proj", {"self_attn.o_proj": hidden}, q, config.o_bias)
        add(f"{prefix}post_attention_layernorm.weight", hidden)
        linear("mlp.gate_up_proj", gate_up, hidden, config.mlp_bias)
        linear("mlp.down_proj", {"mlp.down_proj": hidden}, width, config.mlp_bias)
    add(NORM, hidden)
    if not config.tied:
        add(LM_HEAD, config.vocab_size, hidden)
    return table


def allocate(table: list[Piece], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The decoder's tensors by name, not yet filled.

    Raises:
        OutOfMemoryError: the device cannot hold them.
    """
    shapes = {piece.target: (piece.row + piece.shape[0], *piece.shape[1:]) for piece in table}  # a target's last piece counts
    try:
        return {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    except RuntimeError as error:  # torch.OutOfMemoryError is one; a CPU has no class of its own for it
        raise OutOfMemoryError(f"the weights do not fit on {device}; use a smaller model or dtype") from error


def part(targets: dict[str, Tensor], piece: Piece) -> Tensor:
    """The rows of a target that a piece fills."""
    return targets[piece.target][piece.row : piece.row + piece.shape[0]]
