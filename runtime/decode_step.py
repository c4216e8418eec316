"""Owns the decode step: what it is made of, and its one call. Does not own who holds which slot (scheduler), the model's
arithmetic (the Model), how a layer is played (ops) or the draw (sampling).
"""

import struct
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv_cache import KVCache
from runtime.ops import HAS_BIAS, MAX_END_IDS, STATE_WIDTH, WANTS_LOGPROBS, Ops, Rows, SlotState
from runtime.request import Request
from runtime.sampling import Sampler, Variant

# A wish past these is met as well by the largest word: no vocabulary, context or draw can tell the difference.
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4e38


class Model(Protocol):
    """What the engine asks of a decoder. Everything lies on one device, in one dtype."""

    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    """Whether q and k are normed per head."""
    weight_format: str
    """How the projections of a layer are stored: "bf16" (dense, in `dtype`), "fp8" or "int4"."""
    device: torch.device
    dtype: torch.dtype

    def prefill(self, ids: Tensor, start: int, slot: int, cache: KVCache) -> Tensor:
        """Run prompt tokens ids `[T]` int64 at positions start.. of a slot, write their K/V, return hidden states `[T, C]`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and LM head: hidden `[N, C]` -> `[N, V]` float32."""

    def decode(self, slot_of_row: Tensor, state: SlotState, cache: KVCache, ops: Ops) -> tuple[Rows, Tensor]:
        """One token a row: the last token of each slot of `slot_of_row [B]` -> the step's rows, logits `[B, V]` float32."""


@dataclass(frozen=True)
class DecodeStep:
    """One step of one ops set, ready to be played eagerly or captured: read state, run the model, draw, advance."""

    model: Model
    ops: Ops
    sampler: Sampler
    cache: KVCache
    state: SlotState

    def __call__(self, slot_of_row: Tensor, variant: Variant) -> tuple[Tensor, Tensor]:
        """Play rows `slot_of_row [B]` int32 (-1: idle).

        Returns:
            What `Sampler.draw` tells of each row, tokens first, and logits `[B, V]` float32. Rows of idle or done slots carry
            no meaning; they read and write no cache and no state.
        """
        rows, logits = self.model.decode(slot_of_row, self.state, self.cache, self.ops)
        return self.sampler.draw(logits, rows, self.state, variant, self.ops.pdl), logits

    @property
    def launches_per_layer(self) -> int:
        """Kernel launches of one layer on CUDA."""
        extra = self.ops.launches_per_qk_norm if self.model.qk_norm else 0
        extra += self.ops.launches_per_lowbit if self.model.weight_format != "bf16" else 0
        return self.ops.launches_per_layer + extra

    @property
    def launches(self) -> int:
        """Kernel launches of one step on CUDA with the plain draw, as a profiler counts them; copies are not among them."""
        return self.model.num_layers * self.launches_per_layer + self.ops.launches_around + self.sampler.launches


def pack(request: Request, limit: int) -> list[int]:
    """One slot's words for `request` as it stands before its first token; the order is SlotState's."""
    p = request.params
    length = len(request.prompt_ids)
    seed = p.seed & (2**64 - 1)
    ends = list(request.end_ids) + [-1] * (MAX_END_IDS - len(request.end_ids))
    flags = (HAS_BIAS if p.logit_bias else 0) | (WANTS_LOGPROBS if p.logprobs is not None else 0)
    data = struct.pack(
        f"<5i2I2i3f{MAX_END_IDS}i3fi",
        *(0, length, limit, min(length + request.min_tokens, INT32_MAX), 0),
        *(seed & 0xFFFFFFFF, seed >> 32),
        *(p.choice, min(max(p.top_k, 0), INT32_MAX)),
        *(min(p.temperature, FLOAT32_MAX), p.top_p, p.min_p),
        *ends,
        *(p.repetition_penalty, p.presence_penalty, p.frequency_penalty, flags),
    )
    return list(struct.unpack(f"<{STATE_WIDTH}i", data))
