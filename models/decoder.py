"""Owns the decoder: one for all families, as data. Prefill is torch; a decode step is five calls a layer of an ops set.

Does not own where weights come from (weights, random_weights) or how a step's calls are played (runtime.ops).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.layout import EMBEDDING, LM_HEAD, NORM
from models.rope import RopeConfig
from runtime.kv_cache import KVCache
from runtime.ops import Attention, Linear, Ops, Rows, SlotState
from runtime.ops.fp8 import Fp8
from runtime.ops.lowbit import LowBit, dense
from runtime.ops.rope import rope_torch
from runtime.ops.unfused import float32_logits, rms_norm

TABLE_ROWS = 16384
"""Rows of the rotary tables computed at a time, so that float64 takes little room."""


@dataclass(frozen=True)
class Layer:
    """One layer's weights, by Hugging Face's names; qkv_proj and gate_up_proj are merged, in that order of rows."""

    input_layernorm: Tensor
    qkv_proj: Linear
    o_proj: Linear
    post_attention_layernorm: Tensor
    gate_up_proj: Linear
    down_proj: Linear
    attention: Attention


def rotary_tables(rope: RopeConfig, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin `[length, head_dim/2]` float32, computed in float64: in bfloat16 positions 256 and 257 would be one."""
    inverse = torch.tensor(rope.inverse_frequencies(head_dim), dtype=torch.float64)
    parts = []  # float64 a few rows at a time: a long context's whole table would take much memory
    for positions in torch.arange(length, dtype=torch.float64).split(TABLE_ROWS):
        angles = torch.outer(positions, inverse)
        parts.append((torch.stack((angles.cos(), angles.sin())) * rope.attention_factor).to(torch.float32))
    cos, sin = torch.cat(parts, dim=1).to(device)
    return cos, sin


class Decoder:
    """A decoder on one device, in one dtype. Implements runtime.decode_step.Model.

    Args:
        weights: every target of `layout.pieces(config)`, filled; kept under these names too.
        max_len: positions the rotary tables hold; nothing may be placed past them.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor | Fp8 | LowBit], max_len: int) -> None:
        self.config = config
        self.weights = weights
        tensors = {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}
        self.embedding, self.norm = tensors[EMBEDDING], tensors[NORM]
        self.lm_head = Linear(self.embedding if config.tied else tensors[LM_HEAD])
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.qk_norm = config.qk_norm
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.weight_format = next((weight.format for weight in weights.values() if not isinstance(weight, Tensor)), "bf16")
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        cos, sin = rotary_tables(config.rope, config.head_dim, max_len, self.device)
        window = config.window if config.window is not None and config.window < max_len else None
        self.layers = [_layer(config, weights, f"model.layers.{i}.", cos, sin, window) for i in range(config.num_layers)]

    @torch.inference_mode()
    def prefill(self, ids: Tensor, start: int, slot: int, cache: KVCache) -> Tensor:
        """See Model. What the slot holds before `start` must be the prompt's own earlier chunks."""
        eps, end = self.config.rms_norm_eps, start + len(ids)
        x = F.embedding(ids, self.embedding)  # [T, C]
        for layer, kv in zip(self.layers, cache.layers(), strict=True):
            h = F.linear(rms_norm(x, layer.input_layernorm, eps), dense(layer.qkv_proj.weight), layer.qkv_proj.bias)
            k_slot, v_slot = kv.k[slot, :, :end], kv.v[slot, :, :end]  # [K, S', D]
            q = self._rotate_and_store(h, layer.attention, start, k_slot, v_slot)
            a = prefill_attention(q, k_slot, v_slot, layer.attention.window)
            x = x + F.linear(a, dense(layer.o_proj.weight), layer.o_proj.bias)
            h = F.linear(
                rms_norm(x, layer.post_attention_layernorm, eps), dense(layer.gate_up_proj.weight), layer.gate_up_proj.bias
            )
            gate, up = h.chunk(2, dim=-1)  # [T, F]
            x = x + F.linear(F.silu(gate) * up, dense(layer.down_proj.weight), layer.down_proj.bias)
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        return float32_logits(rms_norm(hidden, self.norm, self.config.rms_norm_eps), self.lm_head)

    @torch.inference_mode()
    def decode(self, slot_of_row: Tensor, state: SlotState, cache: KVCache, ops: Ops) -> tuple[Rows, Tensor]:
        """See Model. Five calls a layer."""
        eps = self.config.rms_norm_eps
        next_norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        first = self.layers[0]
        x, rows = ops.embed(slot_of_row, state, self.embedding, first.input_layernorm, first.qkv_proj)  # [B, C]
        for layer, kv, next_norm in zip(self.layers, cache.layers(), next_norms, strict=True):
            q = ops.norm_qkv_rope(x, layer.input_layernorm, layer.qkv_proj, layer.attention, rows, kv.k, kv.v)
            a = ops.attention(q, layer.attention, rows, kv.k, kv.v)
            x = ops.proj_residual(a, layer.o_proj, x, layer.post_attention_layernorm)
            h = ops.norm_gate_up(x, layer.post_attention_layernorm, layer.gate_up_proj, eps)
            x = ops.proj_residual(h, layer.down_proj, x, next_norm)
        return rows, ops.norm_lm_head(x, self.norm, self.lm_head, eps)

    @staticmethod
    def _rotate_and_store(h: Tensor, spec: Attention, start: int, k_slot: Tensor, v_slot: Tensor) -> Tensor:
        """h `[T, (H+2K)*D]` -> q `[T, H, D]`, normed and rotated; k and v go to positions start.. of the slot `[K, S', D]`."""
        heads = h.view(len(h), -1, spec.head_dim)
        q, k, v = heads.split([spec.heads, spec.kv_heads, spec.kv_heads], dim=1)  # [T, H or K, D]
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
        cos, sin = spec.cos[start : start + len(h)], spec.sin[start : start + len(h)]
        k_slot[:, start:] = rope_torch(k, cos, sin).transpose(0, 1)
        v_slot[:, start:] = v.transpose(0, 1)
        return rope_torch(q, cos, sin)


def prefill_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention of the last T positions: q `[T, H, D]`, k and v `[K, S', D]` with S' >= T -> `[T, H*D]`.

    Query t stands at position S' - T + t; SDPA's own is_causal would put query 0 at position 0.
    """
    length, total = len(q), k.shape[1]
    heads = q.transpose(0, 1)[None]  # [1, H, T, D]
    if window is None or total <= window:
        mask = _causal(length, total, q.device)
        out = F.scaled_dot_product_attention(heads, k[None], v[None], attn_mask=mask, enable_gqa=True)
    else:
        first = max(0, total - length - window + 1)  # no query sees an earlier key
        query = torch.arange(total - length, total, device=q.device)[:, None]
        key = torch.arange(first, total, device=q.device)[None, :]
        mask = (key <= query) & (key > query - window)  # [T, S'']
        # A mask rules out flash attention, and the other kernel that never holds all scores wants as many K as q heads.
        groups = q.shape[1] // k.shape[0]
        k, v = (t[None, :, first:].repeat_interleave(groups, dim=1) for t in (k, v))
        out = F.scaled_dot_product_attention(heads, k, v, attn_mask=mask)
    return out[0].transpose(0, 1).reshape(length, -1)


def _causal(length: int, total: int, device: torch.device) -> Tensor:
    """The mask of the last `length` of `total` positions, on a GPU in the form that flash attention takes."""
    if device.type == "cuda":
        from torch.nn.attention.bias import causal_lower_right  # brings in torch._dynamo, seconds; load_engine does it early

        return causal_lower_right(length, total)
    return torch.ones(length, total, dtype=torch.bool, device=device).tril(total - length)


def _layer(config: ModelConfig, weights: Mapping[str, Any], prefix: str, cos: Tensor, sin: Tensor, window: int | None) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    q_norm, k_norm = (weights.get(f"{prefix}self_attn.{name}_norm.weight") for name in "qk")
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return Layer(
        input_layernorm=weights[f"{prefix}input_layernorm.weight"],
        qkv_proj=linear("self_attn.qkv_proj"),
        o_proj=linear("self_attn.o_proj"),
        post_attention_layernorm=weights[f"{prefix}post_attention_layernorm.weight"],
        gate_up_proj=linear("mlp.gate_up_proj"),
        down_proj=linear("mlp.down_proj"),
        attention=Attention(heads, kv_heads, config.head_dim, config.rms_norm_eps, cos, sin, q_norm, k_norm, window),
    )
