"""Owns the unfused path: one launch for each operation, 15 a layer on CUDA (17 with per-head q and k norms). The oracle of the
fused path. Does not own the one-operation Triton kernels, which stand in files of their own beside their torch twins.

Torch and cuBLAS where they have one launch for the operation; on the CPU every call is torch alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from runtime.ops import Attention, Linear, Rows, SlotState
from runtime.ops.attention import AttentionScratch, attention_tile, attention_torch, decode_attention
from runtime.ops.cache_write import cache_write, cache_write_torch
from runtime.ops.embed import embed, embed_torch
from runtime.ops.lowbit import dense
from runtime.ops.rope import rope, rope_torch
from runtime.ops.silu_mul import silu_mul, silu_mul_torch

COPY_BYTES = 640 << 20
"""The largest float32 copy of an LM head that the CPU keeps; a larger head is upcast at every step."""

LM_HEAD_ROWS = 512
"""Vocabulary rows upcast at a time: more would leave the CPU's caches, at many times the cost."""

_copies = WeakIdKeyDictionary()  # an LM head in 16 bits -> its float32 copy


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, float32 sums, rounded once. One launch on CUDA. Source: arXiv 1910.07467."""
    return F.rms_norm(x, weight.shape, weight, eps)


def float32_logits(x: Tensor, lm_head: Linear) -> Tensor:
    """x `[N, C]` -> `[N, V]` float32, the products summed in float32 and never rounded to x's dtype. Prefill's too."""
    weight = dense(lm_head.weight)
    if x.dtype == torch.float32:
        return F.linear(x, weight)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    if 4 * weight.numel() > COPY_BYTES:
        return torch.cat([F.linear(x.float(), rows.float()) for rows in weight.split(LM_HEAD_ROWS)], dim=-1)
    if weight not in _copies:
        _copies[weight] = weight.float()
    return F.linear(x.float(), _copies[weight])


class UnfusedOps:
    """The seam's calls, each operation a launch of its own. Numbers in the docstrings count a layer's launches on CUDA."""

    name = "unfused"
    pdl = False
    kernels_per_layer: int | None = None
    launches_per_layer = 15
    launches_per_qk_norm = 2
    launches_per_lowbit = 4  # each weight made dense
    launches_around = 3  # embedding; norm, LM head

    def __init__(self) -> None:
        self._scratch: dict[tuple[int, int, int, int], AttentionScratch] = {}

    def embed(
        self, slot_of_row: Tensor, state: SlotState, table: Tensor, next_norm: Tensor, next_proj: Linear
    ) -> tuple[Tensor, Rows]:
        if not table.is_cuda:
            return embed_torch(slot_of_row, state, table)
        x = torch.empty((len(slot_of_row), table.shape[1]), dtype=table.dtype, device=table.device)
        rows = Rows(torch.empty_like(slot_of_row), torch.empty_like(slot_of_row))
        embed(slot_of_row, state, table, x, rows)
        return x, rows

    def norm_qkv_rope(
        self, x: Tensor, norm: Tensor, qkv: Linear, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """1 norm, 2 q, 3 k, 4 v, (per-head q norm, k norm: two more where the model has them,) 5 rope, 6 cache write."""
        spec = attention
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        h = rms_norm(x, norm, spec.eps)
        weights = dense(qkv.weight).split(sizes)
        biases = qkv.bias.split(sizes) if qkv.bias is not None else (None, None, None)
        q, k, v = (F.linear(h, w, b).view(len(x), -1, spec.head_dim) for w, b in zip(weights, biases, strict=True))
        if spec.q_norm is not None and spec.k_norm is not None:
            q, k = rms_norm(q, spec.q_norm, spec.eps), rms_norm(k, spec.k_norm, spec.eps)
        if x.is_cuda:
            rope(q, k, spec, rows.positions)
            cache_write(k, v, rows, k_cache, v_cache)
        else:
            cos, sin = spec.cos[rows.positions], spec.sin[rows.positions]
            q, k = rope_torch(q, cos, sin), rope_torch(k, cos, sin)
            cache_write_torch(k, v, rows, k_cache, v_cache)
        return q

    def attention(self, q: Tensor, attention: Attention, rows: Rows, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """7 attention."""
        if not q.is_cuda:
            return attention_torch(q, attention, rows, k_cache, v_cache)
        spec, batch = attention, len(q)
        tile = attention_tile(spec, batch, k_cache.element_size())
        key = (batch, spec.heads, spec.kv_heads, spec.head_dim)
        if key not in self._scratch:  # kept: its counters stay zero between launches
            self._scratch[key] = AttentionScratch.make(batch, spec, q.device, tile)
        out = torch.empty((batch, spec.heads * spec.head_dim), dtype=q.dtype, device=q.device)
        return decode_attention(q, spec, rows, k_cache, v_cache, out, self._scratch[key], tile)

    def proj_residual(self, a: Tensor, proj: Linear, x: Tensor, next_norm: Tensor) -> Tensor:
        """8 output projection, 9 add; and again as 14 down projection, 15 add."""
        return x + F.linear(a, dense(proj.weight), proj.bias)

    def norm_gate_up(self, x: Tensor, norm: Tensor, gate_up: Linear, eps: float) -> Tensor:
        """10 norm, 11 gate, 12 up, 13 SiLU · up."""
        h = rms_norm(x, norm, eps)
        biases = gate_up.bias.chunk(2) if gate_up.bias is not None else (None, None)
        gate, up = (F.linear(h, w, b) for w, b in zip(dense(gate_up.weight).chunk(2), biases, strict=True))
        return silu_mul(gate, up) if x.is_cuda else silu_mul_torch(gate, up)

    def norm_lm_head(self, x: Tensor, norm: Tensor, lm_head: Linear, eps: float) -> Tensor:
        return float32_logits(rms_norm(x, norm, eps), lm_head)
